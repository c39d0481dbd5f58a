"""Experts that two gloo processes share train as those of one: rows, gradients, models, checkpoints.

`test_mesh_gloo.py` has what takes four processes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from liger_trainer.kernels.moe.experts import moe_experts, moe_experts_reference
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.binding import is_chosen
from liger_trainer.patching.moe.expert_parallel import run_exchanged
from tests.distributed.tensor_parallel import (
    FAMILIES,
    Case,
    batch_of,
    check_step,
    gradients,
    kernels_in,
    load_split,
)
from tests.tiny_models import TINY_MODELS

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 12, 6, 2


# --- rows -----------------------------------------------------------------------------------------------------------


def random_choices(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices


def _all_to_one_process(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor([[3, 2]]).expand(tokens, -1)


def _few_experts(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.stack([torch.tensor([0, EXPERTS - 1]).roll(token) for token in range(tokens)] or [torch.empty(0, 2)])


ROWS: dict[str, tuple[list[int], Callable[[int, torch.Generator], torch.Tensor]]] = {
    "equal tokens": ([6, 6, 6, 6], random_choices),
    "unequal tokens": ([9, 2, 5, 1], random_choices),
    "a process without tokens": ([0, 7, 3, 0], random_choices),
    "no tokens at all": ([0, 0, 0, 0], random_choices),
    "all tokens to the experts of one process": ([5, 4, 2, 3], _all_to_one_process),
    "experts without tokens": ([4, 6, 1, 2], _few_experts),
}
"""The tokens of each process, and their experts."""
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 4e-2},
}


def rows_are_those_of_one(
    rank: int, tokens: list[int], choose: Callable, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Output, and the gradients of hidden, routing weights and experts, beside the whole batch in one process."""
    size, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    whole = [
        torch.randn(sum(tokens[:size]), HIDDEN, generator=generator, dtype=torch.float64),
        torch.rand(sum(tokens[:size]), TOP_K, generator=generator, dtype=torch.float64),
        torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator, dtype=torch.float64),
    ]
    index = choose(sum(tokens[:size]), generator).long()
    upstream = torch.randn(whole[0].shape, generator=generator, dtype=torch.float64)
    hidden, weights, first, second = (x.clone().requires_grad_() for x in whole)
    out = moe_experts_reference(hidden, index, weights, first, second)
    expected = [out, *torch.autograd.grad(out, (hidden, weights, first, second), upstream)]

    local = EXPERTS // size
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    held = slice(rank * local, (rank + 1) * local)
    parts = [mine, mine, mine, held, held]
    hidden, weights, first, second = (
        x[part].to(device, dtype, copy=True).requires_grad_() for x, part in zip(whole, parts[1:])
    )
    experts = functools.partial(moe_experts, gate_up_weight=first, down_weight=second)
    out = run_exchanged(experts, hidden, index[mine].to(device), weights, local, dist.group.WORLD)
    ours = [out, *torch.autograd.grad(out, (hidden, weights, first, second), upstream[mine].to(device, dtype))]
    tolerance = TOLERANCE[dtype]
    for name, got, want, part in zip(("out", "hidden", "weights", "first", "second"), ours, expected, parts):
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(
            got.double().cpu() / scale, want[part] / scale, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def _second_derivatives_are_refused(rank: int) -> None:
    hidden, weights = torch.randn(4, HIDDEN, requires_grad=True), torch.rand(4, TOP_K, requires_grad=True)
    index = torch.arange(8).view(4, 2) % dist.get_world_size()
    out = run_exchanged(lambda rows, ids, w: rows * w, hidden, index, weights, 1, dist.group.WORLD)
    (gradient,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="experts of other processes cannot itself be differentiated"):
        gradient.sum().backward()


def _a_process_without_rows_has_gradients(rank: int) -> None:
    """Though the loop of the class does not meet its weights then: FSDP waits for every process's part."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_local_experts": 2}
    experts = MixtralExperts(MixtralConfig(**sizes, experts_implementation="eager"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    hidden, weights = torch.randn(4, HIDDEN, requires_grad=True), torch.rand(4, TOP_K)
    run_exchanged(experts, hidden, torch.tensor([[0, 1]] * 4), weights, 2, dist.group.WORLD).sum().backward()
    assert all(parameter.grad.any() == (rank == 0) for parameter in experts.parameters())  # type: ignore[union-attr]


def _autocast_rows_are_sent_in_its_dtype(rank: int) -> None:
    local = EXPERTS // dist.get_world_size()
    experts = functools.partial(
        moe_experts, gate_up_weight=torch.randn(local, 12, HIDDEN), down_weight=torch.randn(local, HIDDEN, 6)
    )
    hidden, weights = torch.randn(4, HIDDEN, requires_grad=True), torch.rand(4, TOP_K)
    index = random_choices(4, torch.Generator().manual_seed(rank))
    with _counted_exchanges() as seen, torch.autocast("cpu", torch.bfloat16):
        run_exchanged(experts, hidden, index, weights, local, dist.group.WORLD).float().sum().backward()
    assert [x.dtype for x in seen if x.shape[1:] == (HIDDEN,)] == [torch.bfloat16] * 4


@contextmanager
def _counted_exchanges() -> Iterator[list[torch.Tensor]]:
    """What every all-to-all of `_expert_exchange` is given, in order."""
    from liger_trainer.parallel import expert_exchange as _expert_exchange

    seen: list[torch.Tensor] = []
    exchange = _expert_exchange._all_to_all

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x)
        return exchange(x, *rest)

    _expert_exchange._all_to_all = counted  # type: ignore[assignment]
    try:
        yield seen
    finally:
        _expert_exchange._all_to_all = exchange  # type: ignore[assignment]


def _a_checkpoint_sends_nothing_back(rank: int) -> None:
    """Forward and recomputation exchange counts, rows and weights; only the forward brings results back."""
    from torch.utils.checkpoint import checkpoint

    local = EXPERTS // dist.get_world_size()
    first = torch.randn(local, 2 * INTERMEDIATE, HIDDEN, requires_grad=True)
    second = torch.randn(local, HIDDEN, INTERMEDIATE, requires_grad=True)
    experts = functools.partial(moe_experts, gate_up_weight=first, down_weight=second)
    hidden, weights = torch.randn(4, HIDDEN, requires_grad=True), torch.rand(4, TOP_K)
    index = random_choices(4, torch.Generator().manual_seed(rank))
    with _counted_exchanges() as seen:
        layer = functools.partial(run_exchanged, experts, num_local_experts=local, group=dist.group.WORLD)
        out = checkpoint(layer, hidden, index, weights, use_reentrant=False)
        forward = len(seen)
        out.sum().backward()
    counts, row, weight = 1, HIDDEN, 1
    widths = [x[:1].numel() for x in seen]
    assert widths[:forward] == [counts, row, weight, row]
    assert widths[4:] == [counts, row, weight, row, row]  # dO, and the gradient of hidden; the weights need none


# --- models ---------------------------------------------------------------------------------------------------------

MOE = {"output_router_logits": False, "experts_implementation": "eager"}
SHARED = {"tp_size": 2, "ep_size": 2}
OTHERS = dict.fromkeys(("rope", "rms_norm", "router", "linear_cross_entropy", "cross_entropy"), False)
"""Kernels that are left out, as four processes on one machine take long to prove them."""
PAIR = {"fsdp_size": 2, "ep_size": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": PAIR,
    "mixtral": {"family": "mixtral", **PAIR},
    "gpt_oss, with biases": {"family": "gpt_oss", **PAIR},
    **{
        family: {"family": family, **PAIR} for family in ("deepseek_v3", "glm4_moe", "qwen2_moe", "olmoe", "nemotron_h")
    },
    "checkpointed": {"checkpointed": True, **PAIR},
    "exchange of the library": {"exchanged": False, **PAIR},
    "exchange and experts of the library": {"exchanged": False, "kernels": {"experts": False}, **PAIR},
    "tokens in common": SHARED,
    "tokens in common, all-reduced": {**SHARED, "ep_implementation": "all_reduce", "exchanged": False},
}
"""`DistributedConfig` of two processes, and what else is unlike the first one. All-reduced, experts of other processes
are sentinels."""


def _experts_of(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(type(module), "_apply_gate")]


def model_is_that_of_one_process(
    rank: int,
    family: str = "qwen3_moe",
    kernels: dict[str, Any] | None = None,
    exchanged: bool = True,
    checkpointed: bool = False,
    tolerance: float = 1e-4,
    **config: Any,
) -> None:
    """Loss and the gradients of all parameters, beside one process with the model's own experts, expert by expert."""
    case = Case(family, overrides=MOE, kernels={**OTHERS, **(kernels or {})}, whole_logits=True, tolerance=tolerance)
    model = kernels_in(load_split(FAMILIES[family](**MOE), **config), case)
    for experts in _experts_of(model):
        if not exchanged and is_bound_by_us(experts):
            experts.forward = experts.forward.replaced
        assert is_bound_by_us(experts) == exchanged
        assert is_chosen(experts) == (not kernels)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ranks_of_a_batch = config.get("tp_size", 1)
    batches = [batch_of(case, step) for step in range(dist.get_world_size() // ranks_of_a_batch)]
    for _ in range(2):
        model.zero_grad()
        check_step(model, case, batches, rank // ranks_of_a_batch)


def _evaluates(rank: int, **config: Any) -> None:
    whole = TINY_MODELS["qwen3_moe"](**MOE).eval()
    model = kernels_in(load_split(whole, **config), Case(overrides=MOE, kernels=OTHERS)).eval()
    batch = batch_of(Case(), rank if "fsdp_size" in config else 0)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, whole(**batch).logits, rtol=1e-4, atol=1e-4)


def _is_reported_and_reverted(rank: int) -> None:
    from liger_trainer import apply_liger_kernel, revert_liger_kernel

    model = load_split(TINY_MODELS["qwen3_moe"](), fsdp_size=2, ep_size=2)
    before = [experts.__dict__["forward"] for experts in _experts_of(model)]
    for _ in range(2):
        report = apply_liger_kernel(model)
    (row,) = (row for row in report if row.kernel == "expert exchange")
    assert (row.component, row.count) == ("experts", 2)
    assert "of 2 processes" in row.target
    assert not any(row.kernel == "expert exchange" for row in apply_liger_kernel(model, {"experts": False}))
    revert_liger_kernel(model)
    assert [experts.__dict__["forward"] for experts in _experts_of(model)] == before


def _saves_whole_experts(rank: int) -> None:
    """A checkpoint holds all experts, as of a model that was never split."""
    whole = TINY_MODELS["qwen3_moe"]()
    model = kernels_in(load_split(whole, fsdp_size=2, ep_size=2), Case())
    model(**batch_of(Case(), rank)).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    updated = {name: value - 0.1 * gradients(model)[name] for name, value in whole.named_parameters()}
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    model.save_pretrained(folders[0])
    loaded = type(whole).from_pretrained(folders[0])
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value, updated[name], msg=lambda text, name=name: f"{name}: {text}")


CASES: dict[str, Callable[[int], None]] = {
    **{name: partial(rows_are_those_of_one, tokens=t, choose=c, dtype=torch.float64) for name, (t, c) in ROWS.items()},
    "rows in bf16": partial(rows_are_those_of_one, tokens=[9, 2], choose=random_choices, dtype=torch.bfloat16),
    "second derivatives are refused": _second_derivatives_are_refused,
    "a checkpoint sends nothing back": _a_checkpoint_sends_nothing_back,
    "a process without rows has gradients": _a_process_without_rows_has_gradients,
    "autocast": _autocast_rows_are_sent_in_its_dtype,
    **{name: partial(model_is_that_of_one_process, **config) for name, config in MODELS.items()},
    "evaluates": partial(_evaluates, fsdp_size=2, ep_size=2),
    "evaluates, tokens in common": partial(_evaluates, **SHARED),
    "is reported and reverted": _is_reported_and_reverted,
    "saves whole experts": _saves_whole_experts,
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
