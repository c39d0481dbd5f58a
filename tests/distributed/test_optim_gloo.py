"""`LigerAdamW` on sharded parameters, on four gloo processes: the bits of one process, through every checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import load_fsdp_optimizer, save_fsdp_optimizer
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_trainer.optim import LigerAdamW
from liger_trainer.optim.adamw import _gradient

RANKS = 4
SHAPES = {
    "uneven": (33, 256),
    "even": (8, 1024),
    "two rows": (2, 2048),  # two processes have none
    "vector": (6,),
    "odd": (9, 100),
    "experts": (5, 4, 512),
}
FORMATS: dict[str, dict[str, Any]] = {
    "8bit": {},
    "bf16": {"states": "bf16"},
    "fp32": {"states": "fp32"},
    "8bit, stochastic": {"master": "stochastic"},
    "bf16, stochastic": {"states": "bf16", "master": "stochastic"},
}


class Weights(nn.Module):
    """Parameters without a forward."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def _as(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """`whole`, sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in model.parameters():
            parameter.grad = _as(parameter, torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        optimizer.step()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, gathered."""
    tensor = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def _check_same(model: nn.Module, optimizer: LigerAdamW, reference: nn.Module, wanted: LigerAdamW) -> None:
    """Weights and states of both are the same bits."""
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters()):
        assert torch.equal(_whole(parameter), _whole(other)), name
        assert optimizer.state[parameter].keys() == wanted.state[other].keys()
        for key, value in wanted.state[other].items():
            assert torch.equal(_whole(optimizer.state[parameter][key]), _whole(value)), f"{name}: {key}"


def _alone(steps: int, **options: Any) -> tuple[nn.Module, LigerAdamW]:
    """What one process trains."""
    model = Weights()
    optimizer = LigerAdamW(model.parameters(), lr=1e-3, **options)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _mesh(kind: str) -> DeviceMesh:
    """A mesh for FSDP2: of all processes, of pairs that are replicas of each other, or of this process alone."""
    if kind == "all":
        return init_device_mesh("cpu", (RANKS,))
    if kind == "pairs":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("apart", "alone"))["alone"]


def _sharded(kind: str, **options: Any) -> tuple[nn.Module, LigerAdamW]:
    model = Weights()
    fully_shard(model, mesh=_mesh(kind))
    return model, LigerAdamW(model.parameters(), lr=1e-3, **options)


def _fsdp2(rank: int, name: str, mesh: str = "all") -> None:
    model, optimizer = _sharded(mesh, **FORMATS[name])
    _train(model, optimizer, range(4))
    _check_same(model, optimizer, *_alone(4, **FORMATS[name]))


def _mixed(rank: int) -> None:
    """Plain parameters beside DTensors, in one group, and a parameter in fp32."""
    model, reference = Weights(), Weights()
    for each in (model, reference):
        each.adapter = nn.Parameter(torch.ones(6, 4))
    mesh = _mesh("all")
    for name in ("uneven", "adapter"):
        setattr(model, name, nn.Parameter(distribute_tensor(getattr(model, name).detach(), mesh, [Shard(0)])))
    optimizers = [LigerAdamW(each.parameters(), lr=1e-3) for each in (model, reference)]
    for each, optimizer in zip((model, reference), optimizers):
        _train(each, optimizer, range(3))
    _check_same(model, optimizers[0], reference, optimizers[1])


def _tensor_parallel(rank: int, dim: int, name: str) -> None:
    """Tensor parallelism in a dimension, and FSDP2 in the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, reference = nn.Module(), nn.Module()
    for shape in ((16, 1024), (16, 256), (32, 768)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        for each, value in ((model, distribute_tensor(weight, mesh["tensor"], [Shard(dim)])), (reference, weight)):
            each.register_parameter(f"of {shape}", nn.Parameter(value))
    fully_shard(model, mesh=mesh["data"])
    optimizers = [LigerAdamW(each.parameters(), lr=1e-3, **FORMATS[name]) for each in (model, reference)]
    for each, optimizer in zip((model, reference), optimizers):
        _train(each, optimizer, range(3))
    if dim == 0:
        _check_same(model, optimizers[0], reference, optimizers[1])
        return
    (whole, *cut), (other, *_) = model.parameters(), reference.parameters()
    assert torch.equal(_whole(whole), _whole(other))
    for key, value in optimizers[1].state[other].items():
        assert torch.equal(_whole(optimizers[0].state[whole][key]), _whole(value)), key
    for weight in cut:  # within a block of 256
        assert optimizers[0].state[weight]["exp_avg"].dtype == torch.float32


def _unfinished(rank: int, dtype: torch.dtype) -> None:
    """Gradients that are the result of a collective that nobody has waited for, and one with other placements."""
    mesh = _mesh("all")
    generator = torch.Generator().manual_seed(2)
    value, gradient = (torch.randn(33, 256, generator=generator).to(dtype) for _ in range(2))

    def waiting() -> torch.Tensor:
        result = all_reduce(gradient / RANKS, "sum", mesh)
        assert isinstance(result, AsyncCollectiveTensor)
        return result

    whole, rows = [Replicate()], [Shard(0)]
    sharded = distribute_tensor(gradient, mesh, whole)
    found = []
    for weight, grad in (
        (value.clone(), gradient),
        (value.clone(), waiting()),
        (distribute_tensor(value.clone(), mesh, whole), DTensor.from_local(waiting(), mesh, whole, run_check=False)),
        (distribute_tensor(value.clone(), mesh, rows), sharded),
    ):
        parameter = nn.Parameter(weight)
        parameter.grad = grad
        assert type(_gradient(parameter)) is torch.Tensor  # kernels read its memory
        LigerAdamW([parameter], lr=0.1).step()
        found.append(_whole(parameter))
    assert not torch.equal(found[0], _whole(value))
    assert [torch.equal(each, found[0]) for each in found] == [True] * 4


def _from_torch(rank: int, name: str) -> None:
    """The shards of a state of torch's AdamW become those of the whole one."""
    both = []
    for model, ours in (_sharded("all", **FORMATS[name]), _alone(0, **FORMATS[name])):
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        _train(model, theirs, range(1))
        ours.load_state_dict(theirs.state_dict())
        both += [model, ours]
    _check_same(*both)


def _folder() -> Path:
    """A new folder, the same on all processes."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(str(made[0]))


def _dcp(model: nn.Module, optimizer: Any, folder: Path, save: bool) -> None:
    """A sharded checkpoint; by one process alone if all have all."""
    alone = next(model.parameters()).device_mesh.size() == 1
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    if not save:
        dcp.load(state, checkpoint_id=folder, no_dist=alone)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    elif not alone or dist.get_rank() == 0:
        dcp.save(state, checkpoint_id=folder, no_dist=alone)
    dist.barrier()


def _whole_file(model: nn.Module, optimizer: Any, folder: Path, save: bool) -> None:
    """A checkpoint in one file, which the first process reads."""
    how = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=not save)
    first, path = dist.get_rank() == 0, folder / "optimizer.pt"
    if save:
        state = get_optimizer_state_dict(model, optimizer, options=how)
        if first:
            torch.save(state, path)
    else:
        state = torch.load(path, weights_only=True) if first else {}
        set_optimizer_state_dict(model, optimizer, state, options=how)
    dist.barrier()


def _accelerate(model: nn.Module, optimizer: Any, folder: Path, save: bool, kind: str) -> None:
    """As the Trainer does under FSDP2."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, auto_wrap_policy="no_wrap")
    how = save_fsdp_optimizer if save else load_fsdp_optimizer
    how(plugin, PartialState(cpu=True), optimizer, model, folder)
    dist.barrier()


WAYS: dict[str, Callable[..., None]] = {
    "dcp": _dcp,
    "whole file": _whole_file,
    "accelerate, sharded": partial(_accelerate, kind="SHARDED_STATE_DICT"),
    "accelerate, whole": partial(_accelerate, kind="FULL_STATE_DICT"),
}


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for theirs, ours in zip(source.parameters(), target.parameters()):
            whole = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
            ours.copy_(_as(ours, whole))


def _resumes(rank: int, way: str, meshes: tuple[str, ...], **options: Any) -> None:
    """Two steps on each of the meshes, with a checkpoint between them."""
    model, optimizer = _sharded(meshes[0], **options)
    _train(model, optimizer, range(2))
    for place, mesh in enumerate(meshes[1:], start=1):
        folder = _folder()
        WAYS[way](model, optimizer, folder, save=True)
        before, (model, optimizer) = model, _sharded(mesh, **options)
        _copy_weights(before, model)
        WAYS[way](model, optimizer, folder, save=False)
        _train(model, optimizer, range(2 * place, 2 * place + 2))
    _check_same(model, optimizer, *_alone(2 * len(meshes), **options))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def _another_format(rank: int, before: str, after: str) -> None:
    """A whole checkpoint of a sharded model, from which torch takes only what the optimizer has already."""
    how = StateDictOptions(full_state_dict=True)
    model, optimizer = _sharded("all", **FORMATS[before])
    _train(model, optimizer, range(1))
    state = get_optimizer_state_dict(model, optimizer, options=how)
    with pytest.raises(ValueError, match=f"`states` is '{after}', but the checkpoint of this sharded model"):
        set_optimizer_state_dict(*_sharded("all", **FORMATS[after]), state, options=how)


FSDP1: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig(), FullOptimStateDictConfig()),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}


def _fsdp1(original: bool = False) -> tuple[nn.Module, LigerAdamW]:
    model = nn.Linear(256, 32, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.02)
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=original)
    return model, LigerAdamW(model.parameters(), lr=1e-3)


def _flat(rank: int, kind: StateDictType) -> None:
    """FSDP1's flat parameters, saved in the middle."""
    whole, optimizer = _fsdp1()
    _train(whole, optimizer, range(2))
    resumed, other = _fsdp1()
    _copy_weights(whole, resumed)
    with FSDP.state_dict_type(whole, kind, *FSDP1[kind]), FSDP.state_dict_type(resumed, kind, *FSDP1[kind]):
        state = FSDP.optim_state_dict(whole, optimizer)
        other.load_state_dict(FSDP.optim_state_dict_to_load(resumed, other, state))
    for model, each in ((whole, optimizer), (resumed, other)):
        _train(model, each, range(2, 4))
    _check_same(resumed, other, whole, optimizer)


def _original(rank: int) -> None:
    model, optimizer = _fsdp1(original=True)
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match=r"FSDP1 cannot save with `use_orig_params: true`. Use FSDP2"):
        optimizer.step()


CASES = {
    **{f"fsdp2, {name}": partial(_fsdp2, name=name) for name in FORMATS},
    "fsdp2 of replicas, 8bit, stochastic": partial(_fsdp2, name="8bit, stochastic", mesh="pairs"),
    "mixed": _mixed,
    **{f"rows and fsdp2, {name}": partial(_tensor_parallel, dim=0, name=name) for name in FORMATS},
    "columns and fsdp2": partial(_tensor_parallel, dim=1, name="8bit"),
    "unfinished gradients, bf16": partial(_unfinished, dtype=torch.bfloat16),
    "unfinished gradients, fp32": partial(_unfinished, dtype=torch.float32),
    **{f"from torch, {name}": partial(_from_torch, name=name) for name in ("8bit", "bf16", "fp32")},
    "dcp": partial(_resumes, way="dcp", meshes=("all", "pairs", "alone", "all")),
    "dcp, bf16, stochastic": partial(_resumes, way="dcp", meshes=("all", "alone"), **FORMATS["bf16, stochastic"]),
    **{f"{a} to {b}": partial(_another_format, before=a, after=b) for a, b in (("8bit", "fp32"), ("fp32", "8bit"))},
    **{f"fsdp1, {kind.name}": partial(_flat, kind=kind) for kind in FSDP1},
    "fsdp1, original parameters": _original,
    **{f"{way}": partial(_resumes, way=way, meshes=("all", "all", "pairs")) for way in WAYS if way != "dcp"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
