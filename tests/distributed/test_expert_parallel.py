"""Experts that are split over gloo processes train as those of one process: rows, gradients, models, checkpoints."""

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
import torch.multiprocessing as mp

pytest.importorskip("transformers.distributed")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from liger_trainer.kernels.moe_experts import moe_experts, moe_experts_reference
from liger_trainer.patching.expert_parallel import run_exchanged
from tests.distributed.tensor_parallel import (
    Case,
    batch_of,
    check_step,
    gradients,
    hide_accelerators,
    kernels_in,
    load_split,
)
from tests.distributed.two_processes import failures_of, run_gloo_cases
from tests.tiny_models import TINY_MODELS

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 12, 6, 2


# --- rows -----------------------------------------------------------------------------------------------------------


def _random_choices(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices


def _all_to_one_process(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor([[3, 2]]).expand(tokens, -1)


def _few_experts(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.stack([torch.tensor([0, EXPERTS - 1]).roll(token) for token in range(tokens)] or [torch.empty(0, 2)])


ROWS: dict[str, tuple[list[int], Callable[[int, torch.Generator], torch.Tensor]]] = {
    "equal tokens": ([6, 6, 6, 6], _random_choices),
    "unequal tokens": ([9, 2, 5, 1], _random_choices),
    "a process without tokens": ([0, 7, 3, 0], _random_choices),
    "no tokens at all": ([0, 0, 0, 0], _random_choices),
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


@contextmanager
def _counted_exchanges() -> Iterator[list[int]]:
    """The elements of every all-to-all of `_expert_exchange`, in order."""
    from liger_trainer.kernels import _expert_exchange

    seen: list[int] = []
    exchange = _expert_exchange._all_to_all

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x[:1].numel())
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
    index = _random_choices(4, torch.Generator().manual_seed(rank))
    with _counted_exchanges() as seen:
        layer = functools.partial(run_exchanged, experts, num_local_experts=local, group=dist.group.WORLD)
        out = checkpoint(layer, hidden, index, weights, use_reentrant=False)
        forward = list(seen)
        out.sum().backward()
    counts, row, weight = 1, HIDDEN, 1
    assert forward == [counts, row, weight, row]
    assert seen[4:] == [counts, row, weight, row, row], seen  # dO, and the gradient of hidden; the weights need none


# --- models ---------------------------------------------------------------------------------------------------------

OURS = "moe_experts"
"""The experts of `kernels/moe_experts.py`, as transformers' registry calls them."""


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_experts(hidden, index, weights, self.gate_up_proj, self.down_proj)

    ALL_EXPERTS_FUNCTIONS.register(OURS, forward)


MOE = {"output_router_logits": False}
SHARED = {"tp_size": 2, "ep_size": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"fsdp_size": 2, "ep_size": 2},
    "qwen3_moe, experts of the library": {"fsdp_size": 2, "ep_size": 2, "experts": "grouped_mm"},
    "qwen3_moe, exchange of the library": {"fsdp_size": 2, "ep_size": 2, "kernels": {"experts": False}},
    "mixtral": {"family": "mixtral", "fsdp_size": 2, "ep_size": 2},
    "checkpointed": {"fsdp_size": 2, "ep_size": 2, "checkpointed": True},
    "tokens in common": SHARED,
    "tokens in common, all-reduced": {**SHARED, "ep_implementation": "all_reduce", "exchanged": False},
}
"""`DistributedConfig` of two processes, and what else is unlike the first one."""

FOUR: dict[str, dict[str, Any]] = {
    "an expert a process": {"fsdp_size": 4, "ep_size": 4},
    "two copies of each expert": {"fsdp_size": 4, "ep_size": 2},
    "replicas": {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
    "two tokens' groups, four of experts": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
}


def model_is_that_of_one_process(
    rank: int,
    family: str = "qwen3_moe",
    experts: str = OURS,
    kernels: dict[str, Any] | None = None,
    exchanged: bool = True,
    checkpointed: bool = False,
    tolerance: float = 1e-4,
    **config: Any,
) -> None:
    """Loss and the gradients of all parameters, beside one process with the model's own experts, expert by expert."""
    _register()
    case = Case(family, overrides=MOE, kernels=kernels or {}, tolerance=tolerance)
    model = load_split(TINY_MODELS[family](**MOE), **config)
    model.set_experts_implementation(experts)
    kernels_in(model, case)
    assert ("_exchanging" in model.model.layers[0].mlp.experts.forward.__qualname__) == (exchanged and not kernels)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ranks_of_a_batch = config.get("tp_size", 1)
    batches = [batch_of(case, step) for step in range(dist.get_world_size() // ranks_of_a_batch)]
    for _ in range(2):
        model.zero_grad()
        check_step(model, case, batches, rank // ranks_of_a_batch)


def _evaluates(rank: int, **config: Any) -> None:
    _register()
    whole = TINY_MODELS["qwen3_moe"](**MOE).eval()
    model = kernels_in(load_split(whole, **config), Case(overrides=MOE)).eval()
    batch = batch_of(Case(), rank if "fsdp_size" in config else 0)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, whole(**batch).logits, rtol=1e-4, atol=1e-4)


def _is_reported_and_reverted(rank: int) -> None:
    from liger_trainer import apply_liger_kernel, revert_liger_kernel

    model = load_split(TINY_MODELS["qwen3_moe"](), fsdp_size=2, ep_size=2)
    before = [layer.mlp.experts.__dict__["forward"] for layer in model.model.layers]
    for _ in range(2):
        report = apply_liger_kernel(model)
    (row,) = (row for row in report if row.kernel == "expert exchange")
    assert (row.component, row.count) == ("experts", 2)
    assert "of 2 processes" in row.target
    assert not any(row.kernel == "expert exchange" for row in apply_liger_kernel(model, {"experts": False}))
    revert_liger_kernel(model)
    assert [layer.mlp.experts.__dict__["forward"] for layer in model.model.layers] == before


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


ON_TWO: dict[str, Callable[[int], None]] = {
    **{name: partial(rows_are_those_of_one, tokens=t, choose=c, dtype=torch.float64) for name, (t, c) in ROWS.items()},
    "rows in bf16": partial(rows_are_those_of_one, tokens=[9, 2], choose=_random_choices, dtype=torch.bfloat16),
    "second derivatives are refused": _second_derivatives_are_refused,
    "a checkpoint sends nothing back": _a_checkpoint_sends_nothing_back,
    **{name: partial(model_is_that_of_one_process, **config) for name, config in MODELS.items()},
    "evaluates": partial(_evaluates, fsdp_size=2, ep_size=2),
    "evaluates, tokens in common": partial(_evaluates, **SHARED),
    "is reported and reverted": _is_reported_and_reverted,
    "saves whole experts": _saves_whole_experts,
}
ON_FOUR: dict[str, Callable[[int], None]] = {
    "rows of four": partial(rows_are_those_of_one, tokens=[0, 7, 3, 1], choose=_random_choices, dtype=torch.float64),
    **{name: partial(model_is_that_of_one_process, **config) for name, config in FOUR.items()},
}


def _two(rank: int, port: int, failures: mp.Queue) -> None:
    hide_accelerators()
    run_gloo_cases(ON_TWO, rank, port, failures)


def _four(rank: int, port: int, failures: mp.Queue) -> None:
    hide_accelerators()
    run_gloo_cases(ON_FOUR, rank, port, failures, 4)


@pytest.fixture(scope="module")
def failures_of_two() -> dict[str, str]:
    return failures_of(_two)


@pytest.fixture(scope="module")
def failures_of_four() -> dict[str, str]:
    return failures_of(_four, world=4)


@pytest.mark.parametrize("case", ON_TWO)
def test_two_processes(case: str, failures_of_two: dict[str, str]) -> None:
    assert case not in failures_of_two, failures_of_two[case]


@pytest.mark.parametrize("case", ON_FOUR)
def test_four_processes(case: str, failures_of_four: dict[str, str]) -> None:
    assert case not in failures_of_four, failures_of_four[case]
