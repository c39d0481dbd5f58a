"""Every way to spread a model x what trains x precision x loss: two processes have to train as one.

A cell trains a patched model for some steps of SGD, on padded batches or on packed rows. Losses, gradients after their
reduction and the parameters at the end have to be those of one process that runs the unpatched model in fp32 on the
concatenated batch, on whole logits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.matrix_batches import BATCHES, LOSSES, concatenated, naive_loss, product_loss
from tests.distributed.matrix_models import HYBRIDS, PARAMETERS, SIZES, build_model, inner_model
from tests.distributed.matrix_wrappings import (
    WRAPPINGS,
    Steps,
    Weights,
    trained_gradients,
    trained_weights,
    without_sync,
)
from tests.distributed.tensor_parallel import counted_logits
from tests.distributed.two_processes import WORLD

LEARNING_RATE = 0.05
CHUNK = 8 * SIZES["vocab_size"] * 4  # bytes: 8 tokens, so that the ranks have other numbers of chunks


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a cell computes in.

    Args:
        weights: dtype of the parameters.
        autocast: dtype of autocast around the forward.
        sharded: dtype that FSDP gathers the parameters in.
        scaled: Whether a gradient scaler multiplies the loss, from torch's own first factor on.
        tolerance: The largest error of losses, gradients and steps, relative to the size of each tensor; a gradient of
            one rank alone is wrong by about one.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    sharded: torch.dtype | None = None
    scaled: bool = False
    tolerance: float = 1e-4


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(),
    "bf16 weights": Precision(weights=torch.bfloat16, tolerance=0.1),
    "bf16 autocast": Precision(autocast=torch.bfloat16, tolerance=0.1),
    "bf16 shards": Precision(autocast=torch.bfloat16, sharded=torch.bfloat16, tolerance=0.1),
    "fp16 autocast": Precision(autocast=torch.float16, scaled=True, tolerance=0.02),
    "fp16 shards": Precision(autocast=torch.float16, sharded=torch.float16, scaled=True, tolerance=0.02),
}


@dataclasses.dataclass(frozen=True)
class Packed:
    """How a cell's batches are packed.

    Args:
        most: `tokens_per_micro_batch`.
        checkpointing: Whether the layers are recomputed.
    """

    most: int | None = None
    checkpointing: bool = False


PACKINGS: dict[str, Packed | None] = {
    "padded": None,
    "one row": Packed(),
    # Of "shared" batches these are 4 forwards on the rank with long rows, and 1 on the other.
    "several rows": Packed(14),
    "several rows, layers recomputed": Packed(14, checkpointing=True),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One case of the matrix, by the names of its parts."""

    wrapping: str
    parameters: str
    precision: str = "fp32"
    loss: str = "labels"
    batches: str = "unequal"
    packing: str = "padded"

    def __str__(self) -> str:
        return ", ".join(dataclasses.astuple(self))


_MIXED_FLAT = "a flat parameter trains as a whole or not at all: FSDP1 refuses; PEFT makes units of the trained leaves"
_TWO_UNITS = "FSDP refuses a weight that two units share; accelerate makes norm, embedding and head one unit"
_ADAPTERS = ("lora", "lora with head", "dora", "dora with head", "modules to save", "token rows", "tied token rows")
_NO_SHARDS = "only FSDP gathers parameters in a dtype of its own"
_SHARDED = tuple(name for name, precision in PRECISIONS.items() if precision.sharded is not None)
_SOME_SPLIT = "torch's gradient scaler refuses parameters of which only some are split"
_NO_AUTOCAST = "DeepSpeed switches autocast off: in bf16 and fp16 its weights are that"
_ZERO = tuple(wrapping for wrapping in WRAPPINGS if wrapping.startswith("zero"))
_TIED = ("tied head", "tied token rows")

LEFT_OUT: dict[tuple[str, str], str] = {
    **{("fsdp1 flat", name): _MIXED_FLAT for name in (*_ADAPTERS, "frozen head")},
    **{(f"{wrapping}", name): _TWO_UNITS for wrapping in ("fsdp1 head alone", "fsdp1 flat leaves") for name in _TIED},
    **{("tp", name): "DoRA needs the norms of the whole weight" for name in ("dora", "dora with head")},
    **{("tp with head", name): "PEFT has no adapter on a split head" for name in _ADAPTERS},
    ("fsdp1 flat leaves", "token rows"): "the trained rows are no leaf with a weight: FSDP1 refuses",
    ("fsdp1 flat leaves", "tied token rows"): "as untied",
    ("tp with head", "tied head"): "a split head and a whole embedding are two weights",
    **{(wrapping, name): _NO_SHARDS for wrapping in WRAPPINGS if "sdp" not in wrapping for name in _SHARDED},
    **{(wrapping, "fp16 autocast"): _SOME_SPLIT for wrapping in ("tp", "tp with head")},
    **{(wrapping, name): _NO_AUTOCAST for wrapping in _ZERO for name in ("bf16 autocast", "fp16 autocast")},
}
"""(wrapping, parameters) and (wrapping, precision) that make no sense, and why."""

_GONE = "FSDP1 frees the weight of a unit of the head's own when the head has run"
_SPLIT = "the logits of a split head are split over the ranks; its own forward puts them together"
_TRAINED_HEAD = ("full", "full, head not fused", "lora with head", "dora with head", "modules to save")

WHOLE_LOGITS: dict[tuple[str, str], str] = {
    **{("fsdp1 head alone", name): _GONE for name in PARAMETERS},
    **{("fsdp1 flat leaves", name): _GONE for name in _TRAINED_HEAD},
    **{("tp with head", name): _SPLIT for name in PARAMETERS},
}
"""(wrapping, parameters) that train right, on whole logits, and why."""


HEADS = ("full", "tied head", "lora with head", "dora with head", "modules to save")
"""Parameters with a head that trains and is fused with its loss."""


def _cells() -> list[Cell]:
    """Every wrapping with all parameters; and with every precision, loss and kind of batches, and a head that trains.

    Losses and batches take turns among the heads that a wrapping can train; where these are too few, "full" is trained
    several times. What trains no head, or runs on logits built for it, takes the losses in turn.
    """
    losses, kinds, cells = list(LOSSES), [name for name in BATCHES if name != "shared"], []
    for first, wrapping in enumerate(WRAPPINGS):
        trained = [name for name in PARAMETERS if (wrapping, name) not in LEFT_OUT]
        heads = [name for name in HEADS if name in trained]
        heads += ["full"] * (max(len(losses), len(kinds)) - len(heads))
        for turn, name in enumerate(heads):
            loss, batches = losses[(first + turn) % len(losses)], kinds[(first // len(losses) + turn) % len(kinds)]
            cells.append(Cell(wrapping, name, "fp32", loss, batches))
        for turn, name in enumerate((name for name in trained if name not in HEADS), first):
            cells.append(Cell(wrapping, name, "fp32", losses[turn % len(losses)]))
        alternately = [name for name in ("full", "lora with head") if name in trained]
        for turn, precision in enumerate(list(PRECISIONS)[1:]):
            name, loss = alternately[turn % len(alternately)], losses[(first + turn) % len(losses)]
            cells.append(Cell(wrapping, name, precision, loss))
    return [cell for cell in cells if (cell.wrapping, cell.precision) not in LEFT_OUT]


def _packed_cells() -> list[Cell]:
    """Several forwards for each wrapping, once with recomputed layers, and one row for some."""
    cells, several = [], ["several rows", "several rows, layers recomputed"]
    for turn, wrapping in enumerate(WRAPPINGS):
        pairs = zip((("full", "dpo"), ("lora with head", "grpo")), several[:: 1 - 2 * (turn % 2)])
        cells += [Cell(wrapping, name, "fp32", loss, "shared", packing) for (name, loss), packing in pairs]
        if wrapping in ("ddp", "fsdp1", "fsdp2 tail resharded", "tp", "zero3"):
            cells.append(Cell(wrapping, "full", "fp32", "grpo", "shared", "one row"))
    return [cell for cell in cells if (cell.wrapping, cell.parameters) not in LEFT_OUT]


_RECOMPUTED = "several rows, layers recomputed"
_OF_HYBRIDS = (
    Cell("ddp", "qwen3_5_text", loss="dpo", batches="shared", packing=_RECOMPUTED),
    Cell("ddp", "lfm2, lora", loss="labels", batches="accumulated"),
    Cell("ddp", "nemotron_h", loss="grpo", batches="unequal"),
    Cell("fsdp1", "qwen3_5_text", loss="sft", batches="a rank without labels"),
    Cell("fsdp2 tail resharded", "qwen3_5_text", loss="grpo", batches="shared", packing="one row"),
    Cell("fsdp2 tail resharded", "qwen3_5_text, lora", loss="dpo", batches="shared", packing=_RECOMPUTED),
    Cell("fsdp2 tail", "qwen3_5_text", "bf16 shards", loss="labels"),
    Cell("fsdp2 head alone resharded", "nemotron_h", loss="sft", batches="accumulated"),
    Cell("fsdp2 root resharded", "lfm2", loss="labels", batches="short last"),
    Cell("zero2", "qwen3_5_text", loss="labels", batches="accumulated"),
    Cell("zero3", "qwen3_5_text", loss="grpo", batches="shared", packing="one row"),
    Cell("zero3", "qwen3_5_text, lora", loss="dpo", batches="shared", packing=_RECOMPUTED),
    Cell("zero3", "nemotron_h", loss="labels"),
    Cell("zero3", "lfm2, lora", loss="sft"),
    Cell("tp", "nemotron_h", loss="labels"),
)
OF_HYBRIDS: dict[str, Cell] = {str(cell): cell for cell in _OF_HYBRIDS if cell.wrapping in WRAPPINGS}
CELLS: dict[str, Cell] = {**{str(cell): cell for cell in (*_cells(), *_packed_cells())}, **OF_HYBRIDS}


@dataclasses.dataclass
class Training:
    """What a training did: the loss and the gradients of every step, and the parameters after them."""

    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[Weights] = dataclasses.field(default_factory=list)
    after: Weights = dataclasses.field(default_factory=dict)


@functools.cache
def _unpatched(parameters: str) -> nn.Module:
    return build_model(parameters)


@functools.cache
def start_of(parameters: str, weights: torch.dtype) -> Weights:
    """The parameters before training, as `weights` can hold them."""
    return trained_weights(copy.deepcopy(_unpatched(parameters)).to(weights))


@functools.cache
def expected_training(parameters: str, weights: torch.dtype, loss_name: str, batches: str, steps: int) -> Training:
    """One process, unpatched, in fp32 on weights that `weights` can hold, on whole logits."""
    model, loss = copy.deepcopy(_unpatched(parameters)).to(weights).float(), LOSSES[loss_name]
    optimizer, found = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), Training()
    for step in range(steps):
        batch = concatenated(list(itertools.chain(*BATCHES[batches](step))))
        value = naive_loss(model, batch, loss, loss.count([batch]))
        value.backward()
        found.losses.append(value.item())
        found.gradients.append(trained_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    found.after = trained_weights(model)
    return found


@functools.cache
def _with_kernels(parameters: str, weights: torch.dtype) -> nn.Module:
    from liger_trainer import apply_liger_kernel

    model, options = copy.deepcopy(_unpatched(parameters)).to(weights), {**PARAMETERS, **HYBRIDS}[parameters]
    report = apply_liger_kernel(model, {"logits_memory": CHUNK, "linear_cross_entropy": options.fused})
    head = next(row for row in report if row.component in ("linear_cross_entropy", "cross_entropy"))
    assert head.applied, head
    applied = {row.component for row in report.applied}
    assert "lora" in applied or "lora" not in parameters
    assert applied & {"recurrence", "short_conv"} or options.hybrid is None
    return model


def patched_model(cell: Cell, packing: Any = None) -> Any:
    """The model with every kernel, and with the fused head of TRL's trainers where the loss is one of theirs.

    With `packing`, a `Packing`, that head packs its batches.
    """
    from liger_trainer.trainers.fused_forward import StatisticsOptions
    from liger_trainer.trainers.trl_mixin import install_fused_forward

    model = copy.deepcopy(_with_kernels(cell.parameters, PRECISIONS[cell.precision].weights))
    options = LOSSES[cell.loss].options
    if options is not None:
        install_fused_forward(inner_model(model), StatisticsOptions(**options), packing)
    return model


def _train(model: nn.Module, cell: Cell, rank: int) -> Training:
    wrapping, precision, loss = WRAPPINGS[cell.wrapping], PRECISIONS[cell.precision], LOSSES[cell.loss]
    wrapped = wrapping.wrap(model, precision.sharded)
    steps, found = Steps(wrapped, LEARNING_RATE, precision.scaled), Training()
    weights = start_of(cell.parameters, precision.weights)
    for step in range(wrapping.steps):
        ranks = BATCHES[cell.batches](step)
        items = loss.count(list(itertools.chain(*ranks)))
        together = [concatenated(list(batches)) for batches in zip(*ranks)]
        batches, scale = (ranks[rank], WORLD) if wrapping.splits_batch else (together, 1)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            synced = contextlib.nullcontext() if index == len(batches) - 1 else without_sync(wrapped)
            autocast = torch.autocast("cpu", dtype=precision.autocast, enabled=precision.autocast is not None)
            with synced:
                with autocast:
                    value = product_loss(wrapped, batch, loss, items)
                steps.backward(value * scale)
            total += value.detach().float()
        if wrapping.splits_batch:
            dist.all_reduce(total)
        found.losses.append(total.item())
        steps.unscale()
        if wrapping.keeps_parameters:
            found.gradients.append(trained_gradients(wrapped))
        steps.step()
        if not wrapping.keeps_parameters:
            last, weights = weights, trained_weights(wrapped)
            found.gradients.append({name: (last[name] - weights[name]) / LEARNING_RATE for name in weights})
    found.after = trained_weights(wrapped)
    return found


def _packing_of(cell: Cell) -> Any:
    from liger_trainer.packing.packing import Packing

    packed = PACKINGS[cell.packing]
    return None if packed is None else Packing(share=True, most=packed.most)


def _watch(model: nn.Module) -> None:
    """Checks at every run of the second layer that FSDP2 has sharded the weights of the first again."""
    first, second = inner_model(model).model.layers

    def check(*_: Any) -> None:
        assert all(isinstance(each, DTensor) for each in first.parameters()), "the weights of both layers are gathered"

    second.register_forward_pre_hook(check)


def _check(what: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float, scale: float) -> None:
    error, size = (ours - expected).norm().item(), max(expected.norm().item(), scale)
    assert error <= tolerance * size, f"{what} is off by {error:.2e}, its size is {size:.2e}"


def _norm(tensors: Weights) -> float:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm().item()


def run_cell(cell: Cell, rank: int) -> None:
    """Trains as `cell` says.

    Raises:
        AssertionError: where the training is not that of one process, or whole logits were built unexpectedly.
    """
    precision, wrapping = PRECISIONS[cell.precision], WRAPPINGS[cell.wrapping]
    before = start_of(cell.parameters, precision.weights)
    expected = expected_training(cell.parameters, precision.weights, cell.loss, cell.batches, wrapping.steps)
    packed, packing = PACKINGS[cell.packing], _packing_of(cell)
    model = patched_model(cell, packing)
    if packed is not None and packed.checkpointing:
        inner_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    # The first layer keeps its weights where its input has no gradient.
    if cell.wrapping.endswith("resharded") and cell.parameters == "full":
        _watch(model)
    with counted_logits() as seen:
        ours = _train(model, cell, rank)
    if packed is not None:
        assert packing.executed < packing.trained, "no batch was packed, or nothing shared"
        assert packing.levels == (1 if cell.parameters in HYBRIDS else 2)
    tolerance, keeps = precision.tolerance, wrapping.keeps_parameters

    def known(name: str) -> float:
        """What a gradient is known to, read from a step, over the tolerance."""
        rounding = torch.finfo(precision.weights).eps * before[name].norm().item()
        return 0.0 if keeps else rounding / LEARNING_RATE / tolerance

    for step in range(wrapping.steps):
        value, wanted = (torch.tensor(losses[step]) for losses in (ours.losses, expected.losses))
        _check(f"the loss of step {step}", value, wanted, tolerance, 0.0)
        gradients, wanted_gradients = ours.gradients[step], expected.gradients[step]
        assert gradients.keys() == wanted_gradients.keys(), gradients.keys() ^ wanted_gradients.keys()
        floor = 1e-2 * _norm(wanted_gradients)
        for name, wanted in wanted_gradients.items():
            _check(f"step {step}: gradient of {name}", gradients[name], wanted, tolerance, floor + known(name))
    for name, after in expected.after.items():
        # A step is known as well as the weights can hold it.
        held = torch.finfo(precision.weights).eps * wrapping.steps * after.norm().item()
        step_size = (after - before[name]).norm().item()
        _check(f"{name} at the end", ours.after[name], after, 1.0, tolerance * step_size + held)
    whole = seen["built"] > 0 or seen["deferred"] == 0
    assert whole == ((cell.wrapping, cell.parameters) in WHOLE_LOGITS), f"whole logits: {whole}, {seen}"
