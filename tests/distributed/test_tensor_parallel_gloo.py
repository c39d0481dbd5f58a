"""A model that transformers has split over two gloo processes trains with the kernels as one process does without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.distributed.matrix_batches import LOSSES
from tests.distributed.tensor_parallel import (
    FAMILIES,
    IGNORE,
    Case,
    Gathers,
    assert_near,
    assert_same_gradients,
    batch_of,
    check_step,
    counted_logits,
    gradients,
    kernels_in,
    load_split,
    with_adapters,
)
from tests.distributed.two_processes import WORLD
from tests.tiny_models import TINY_MODELS

LAYERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ODD = {"vocab_size": 127}  # 64 and 63 rows
TRAINED: dict[str, Case] = {
    **{f"llama, {loss}": Case(loss=loss) for loss in LOSSES},
    **{f"odd vocabulary, {loss}": Case(loss=loss, overrides=ODD) for loss in LOSSES},
    "qwen3": Case("qwen3", "sft"),
    "gemma3, tied": Case("gemma3_text", "grpo"),
    "gemma2, tied and soft-capped": Case("gemma2", "dpo"),
    "gemma2, tied, odd vocabulary": Case("gemma2", "sft", ODD),
    "cohere, logit scale": Case("cohere", "grpo"),
    "granite, logit scale": Case("granite", "sft"),
    "bias": Case("biased llama", "grpo"),
    "bias, odd vocabulary": Case("biased llama", "sft", ODD),
    "mixtral": Case("mixtral", "labels", {"output_router_logits": False}),
    "multimodal": Case("gemma3", "labels"),
    "gated delta net": Case("qwen3_5_text", "grpo"),
    "gated delta net, lora": Case("qwen3_5_text", "dpo", lora=LAYERS),
    "gated delta net, experts": Case("qwen3_5_moe_text", "labels", {"output_router_logits": False}),
    "mamba 2": Case("mamba 2", "sft"),
    "short convolution": Case("lfm2", "labels"),
    "head not fused": Case(kernels={"linear_cross_entropy": False}),
    "head not fused, odd vocabulary": Case(overrides=ODD, kernels={"linear_cross_entropy": False}),
    "no head": Case(kernels={"linear_cross_entropy": False, "cross_entropy": False}, whole_logits=True),
    "MLPs that keep their product": Case("qwen3", kernels={"recompute_mlp": False}),
    "MLPs in tiles": Case("gemma3_text", kernels={"tiled_mlp": True}),
    "bf16 autocast": Case(loss="sft", autocast=torch.bfloat16, tolerance=0.1),
    "lora": Case("llama", "dpo", lora=LAYERS),
    "lora, MLPs in tiles": Case("llama", "sft", lora=LAYERS, kernels={"tiled_mlp": True}),
}
"""Losses, logits and layers under `DistributedConfig(tp_size=2)`."""

LEFT_OUT = {
    "adapters on o_proj and down_proj": "PEFT 0.21 gives the split layer an adapter of the wrong width, and fails",
    "an adapter on the head": "PEFT refuses it",
    "a head to save": "PEFT's copy of a split head calls the original, which it froze",
    "a head in fp32": "TRL replaces the forward that puts the logits together; `LigerGRPOTrainer` says so",
}
"""What makes no sense under tensor parallelism, and why."""


def _trains(rank: int, case: Case) -> None:
    split = load_split(FAMILIES[case.family](**case.overrides), tp_size=WORLD)
    model = kernels_in(with_adapters(split, case.lora), case)
    for _ in range(2):  # the second finds what the first has left behind
        model.zero_grad()
        check_step(model, case, [batch_of(case)])


def _gathers_no_weight(rank: int) -> None:
    case = Case(loss="grpo")
    model, gathers = kernels_in(load_split(TINY_MODELS["llama"](), tp_size=WORLD), case), Gathers()
    batch = batch_of(case)
    check_step(model, case, [batch], gathers=gathers)
    assert set(gathers.shapes) == {(batch["input_ids"].numel(), 8)}, gathers.shapes


def _leaves_rows_out(rank: int, case: Case) -> None:
    """Rows without a label are not multiplied, on any process."""
    from liger_trainer.head import fused_loss
    from tests.steps import step_with

    fused_loss._ROW_MULTIPLE = 4
    batch = batch_of(case)
    batch["labels"][:, 4:] = IGNORE
    count = int((batch["labels"] != IGNORE).sum())
    kept = -(-count // 4) * 4
    assert kept < 0.9 * batch["labels"].numel()
    model, gathers = kernels_in(load_split(FAMILIES[case.family](**case.overrides), tp_size=WORLD), case), Gathers()
    with step_with(labelled=lambda: count):
        check_step(model, case, [batch], gathers=gathers)
    fused_loss._ROW_MULTIPLE = 512
    assert set(gathers.shapes) == {(kept, 8)}, gathers.shapes


def _logits_are_read(rank: int) -> None:
    """Logits that a caller reads, in training and in evaluation, are the model's own, with their gradients."""
    whole, batch = TINY_MODELS["llama"](**ODD), batch_of(Case())
    labels = batch.pop("labels")
    model = kernels_in(load_split(whole, tp_size=WORLD), Case())
    weights = torch.linspace(0.5, 1.5, ODD["vocab_size"])
    logits = {}
    for name, each in (("ours", model), ("whole", whole.train())):
        logits[name] = each(**batch).logits + 0
        target = F.pad(labels, (0, 1), value=IGNORE)[:, 1:].reshape(-1)
        F.cross_entropy(logits[name].view(-1, ODD["vocab_size"]), target).backward()
        # Class weights are unknown to the kernels on a split vocabulary.
        F.cross_entropy(each(**batch).logits.view(-1, ODD["vocab_size"]), target, weights).backward()
    assert_near("the logits", logits["ours"], logits["whole"].detach(), 1e-5)
    assert_same_gradients(gradients(model), gradients(whole), 1e-4)
    model.eval()
    torch.testing.assert_close(model(**batch).logits, whole.eval()(**batch).logits)


def _evaluates(rank: int) -> None:
    whole, batch = TINY_MODELS["gemma2"](), batch_of(Case())
    model = kernels_in(load_split(whole, tp_size=WORLD), Case("gemma2")).eval()
    with torch.no_grad(), counted_logits() as seen:
        loss = model(**batch, skip_logits=True).loss
    assert seen["deferred"] > 0
    assert seen["built"] == 0
    torch.testing.assert_close(loss, whole.eval()(**batch).loss)


def _other_splits_are_reported(rank: int) -> None:
    """A head that torch's own `parallelize_module` splits builds its logits, and says so once."""
    import logging

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("liger_trainer.head.warn_once").addHandler(handler)
    case = Case(whole_logits=True)
    model = kernels_in(TINY_MODELS["llama"]().train(), case)
    parallelize_module(
        model, init_device_mesh("cpu", (WORLD,)), {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    )
    for _ in range(2):
        model.zero_grad()
        check_step(model, case, [batch_of(case)])
    assert len(said) == 1
    assert "split over processes in a way that the fused cross entropy does not support" in said[0]


def _is_reverted(rank: int) -> None:
    from liger_trainer import apply_liger_kernel, revert_liger_kernel

    model = load_split(TINY_MODELS["qwen3"](), tp_size=WORLD)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    for _ in range(2):
        apply_liger_kernel(model)
    revert_liger_kernel(model)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before


def _distils(rank: int) -> None:
    """The divergence of a split student from a whole teacher, a chunk of gathered logits at a time."""
    from liger_trainer.head.divergence import divergence
    from tests.steps import step_with

    whole, teacher = TINY_MODELS["llama"]().train(), TINY_MODELS["qwen3"]().eval()
    batch = batch_of(Case())
    labels = batch.pop("labels")
    student = kernels_in(load_split(whole, tp_size=WORLD), Case())
    with torch.no_grad():
        given = teacher(**batch).logits
    with step_with(loss_follows=True), counted_logits() as seen:
        ours = divergence(student(**batch).logits, given, labels, beta=0.5).loss
    ours.backward()
    assert seen["built"] == 0
    expected = divergence(whole(**batch).logits, given, labels, beta=0.5).loss
    expected.backward()
    torch.testing.assert_close(ours, expected)
    assert_same_gradients(gradients(student), gradients(whole), 1e-4)


CASES: dict[str, Callable[[int], None]] = {
    **{name: partial(_trains, case=case) for name, case in TRAINED.items()},
    "gathers no weight": _gathers_no_weight,
    **{f"leaves rows out, {loss}": partial(_leaves_rows_out, case=Case(loss=loss)) for loss in ("labels", "grpo")},
    "leaves rows out, soft-capped": partial(_leaves_rows_out, case=Case("gemma2", "sft", ODD)),
    "leaves rows out, head not fused": partial(_leaves_rows_out, case=TRAINED["head not fused"]),
    "logits are read": _logits_are_read,
    "evaluates": _evaluates,
    "is reverted": _is_reverted,
    "other splits are reported": _other_splits_are_reported,
    "distils": _distils,
}


@pytest.mark.parametrize("case", CASES)
def test_split_model_is_the_whole_one(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
