"""How the matrix spreads a model over two processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED
from tests.distributed.matrix_models import inner_model
from tests.distributed.matrix_zero import is_engine, whole_gradient, whole_weight, zero
from tests.distributed.two_processes import WORLD

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """How the model is spread.

    Args:
        wrap: Maps the model, and the dtype FSDP computes in (None for that of the parameters), to what is trained.
        splits_batch: Whether every rank has rows of its own, and gradients are means over the ranks.
        keeps_parameters: Whether the parameters keep their gradients apart; else they are only known by what an
            optimizer step of SGD does.
        steps: How many steps are trained.
    """

    wrap: Callable[[nn.Module, torch.dtype | None], nn.Module]
    splits_batch: bool = True
    keeps_parameters: bool = True
    steps: int = 2


def _ddp(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(model: nn.Module, dtype: torch.dtype | None, units: str, use_orig_params: bool) -> nn.Module:
    inner = inner_model(model)
    layers = set(inner.model.layers)
    if units == "head alone":
        layers.add(inner.get_output_embeddings())

    def is_unit(module: nn.Module) -> bool:
        # PEFT's policy: a flat parameter trains as a whole or not at all, so every trained leaf is a unit.
        trains = getattr(module, "weight", None) is not None and module.weight.requires_grad
        return module in layers or (units == "trained leaves" and trains and not list(module.children()))

    return FSDP1(
        model,
        auto_wrap_policy=CustomPolicy(is_unit),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        mixed_precision=None if dtype is None else MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
    )


def _fsdp2(
    model: nn.Module, dtype: torch.dtype | None, units: str, reshard: bool, shape: tuple[int, ...] = (WORLD,)
) -> nn.Module:
    """accelerate's cuts: the layers, the embedding, the tail of norm and head, or the head alone, and the root."""
    names = ("replicate", "shard")[-len(shape) :]
    inner = inner_model(model)
    options: dict[str, Any] = {"mesh": init_device_mesh(inner.device.type, shape, mesh_dim_names=names)}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in inner.model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    shared = [embedding] if inner.config.tie_word_embeddings else []
    if units != "root":
        if not shared:
            fully_shard(embedding, reshard_after_forward=reshard, **options)
        norm = [inner.model.norm] if units == "tail" else []
        fully_shard([*norm, *shared, head], reshard_after_forward=reshard, **options)
    return fully_shard(model, reshard_after_forward=reshard, **options)


def _tensor_parallel(model: nn.Module, dtype: torch.dtype | None, head: bool) -> nn.Module:
    inner = inner_model(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    plan: dict[str, Any] = {}
    for name, module in inner.named_modules():
        last = name.rpartition(".")[2]
        by_columns = last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        if not by_columns and last not in ("o_proj", "down_proj"):
            continue
        style = ColwiseParallel if by_columns else RowwiseParallel
        if isinstance(module, nn.Linear):
            plan[name] = style()
        else:  # an adapter: the factor next to what is split is split with it
            plan[f"{name}.base_layer"] = style()
            plan[f"{name}.lora_{'B' if by_columns else 'A'}.default"] = style()
    if head:
        from torch.distributed.tensor import Replicate

        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(inner, mesh, plan)
    return model


WRAPPINGS: dict[str, Wrapping] = {
    "single": Wrapping(lambda model, dtype: model, splits_batch=False),
    "ddp": Wrapping(_ddp),
    "fsdp1": Wrapping(partial(_fsdp1, units="layers", use_orig_params=True)),
    "fsdp1 head alone": Wrapping(partial(_fsdp1, units="head alone", use_orig_params=True)),
    "fsdp1 flat": Wrapping(partial(_fsdp1, units="layers", use_orig_params=False), keeps_parameters=False),
    "fsdp1 flat leaves": Wrapping(
        partial(_fsdp1, units="trained leaves", use_orig_params=False), keeps_parameters=False
    ),
    "fsdp2 tail": Wrapping(partial(_fsdp2, units="tail", reshard=False)),
    "fsdp2 tail resharded": Wrapping(partial(_fsdp2, units="tail", reshard=True)),
    "fsdp2 head alone": Wrapping(partial(_fsdp2, units="head alone", reshard=False)),
    "fsdp2 head alone resharded": Wrapping(partial(_fsdp2, units="head alone", reshard=True)),
    "fsdp2 root": Wrapping(partial(_fsdp2, units="root", reshard=False)),
    "fsdp2 root resharded": Wrapping(partial(_fsdp2, units="root", reshard=True)),
    "hsdp tail": Wrapping(partial(_fsdp2, units="tail", reshard=False, shape=(WORLD, 1))),
    "tp": Wrapping(partial(_tensor_parallel, head=False), splits_batch=False),
    "tp with head": Wrapping(partial(_tensor_parallel, head=True), splits_batch=False),
}
if HAS_DEEPSPEED:
    # ZeRO-3 learns the order of its gathers in the first two steps.
    WRAPPINGS |= {f"zero{stage}": Wrapping(partial(zero, stage=stage), steps=stage) for stage in (2, 3)}


@contextlib.contextmanager
def without_sync(wrapped: Any) -> Iterator[None]:
    """As accelerate, for all forwards of a step but the last."""
    if is_engine(wrapped):
        wrapped.set_gradient_accumulation_boundary(False)
        yield
        wrapped.set_gradient_accumulation_boundary(True)
    elif hasattr(wrapped, "no_sync"):
        with wrapped.no_sync():
            yield
    elif hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(False)
        yield
        wrapped.set_requires_gradient_sync(True)
    else:
        yield


class Steps:
    """Backwards and steps of SGD, with a gradient scaler if `scaled`.

    The scaler is what accelerate takes: FSDP1 has one of its own, as its processes find other overflows. DeepSpeed's
    engine does all of it itself.
    """

    def __init__(self, wrapped: Any, learning_rate: float, scaled: bool) -> None:
        self._engine = wrapped if is_engine(wrapped) else None
        self._optimizer = torch.optim.SGD(wrapped.parameters(), lr=learning_rate)
        scaler = ShardedGradScaler if isinstance(wrapped, FSDP1) else torch.amp.GradScaler
        # A summed loss such as DPO's overflows at the usual scale of 2^16, and such a step would be left out.
        self._scaler = scaler("cpu", init_scale=2.0**10, enabled=scaled)

    def backward(self, loss: torch.Tensor) -> None:
        """Of one forward."""
        if self._engine is not None:
            self._engine.backward(loss)
        else:
            self._scaler.scale(loss).backward()

    def unscale(self) -> None:
        """Makes the gradients those of the loss."""
        self._scaler.unscale_(self._optimizer)

    def step(self) -> None:
        """Moves the weights, and forgets the gradients."""
        if self._engine is not None:
            self._engine.step()
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


def trained_weights(wrapped: nn.Module) -> Weights:
    """The trained parameters by the name they have in the model; whole, in fp32."""
    with _summoned(wrapped):
        found = list(_trained(wrapped))
        if is_engine(wrapped):
            found = [(name, whole_weight(parameter)) for name, parameter in found]
        return {name: _whole(weight) for name, weight in found}


def trained_gradients(wrapped: nn.Module) -> Weights:
    """Their gradients, alike.

    Raises:
        AssertionError: where a trained parameter has none, or a frozen one has.
    """
    gradients = {}
    with _summoned(wrapped, with_grads=True):
        for path, parameter in wrapped.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None or not parameter.grad.any(), f"{path} is frozen and has a gradient"
        for name, parameter in _trained(wrapped):
            gradient = whole_gradient(parameter) if is_engine(wrapped) else parameter.grad
            assert gradient is not None, f"{name} has no gradient"
            gradients[name] = _whole(gradient)
    return gradients


def _summoned(wrapped: nn.Module, with_grads: bool = False) -> contextlib.AbstractContextManager[None]:
    if isinstance(wrapped, FSDP1):
        return FSDP1.summon_full_params(wrapped, writeback=False, with_grads=with_grads)
    return contextlib.nullcontext()


def _trained(wrapped: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            yield path.replace("_fsdp_wrapped_module.", "").removeprefix("module."), parameter


def _whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().clone()
