"""Masks whose rows the host knows are those of the rows that it would read back, and nothing is read."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaModel

from liger_trainer.attention import interface, masks
from liger_trainer.head import forward as head_forward
from liger_trainer.head.forward import rows_of
from liger_trainer.head.step import Padding, Step, bounds_of, current_step
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers import step as trainer_step
from liger_trainer.trainers.step import KnownBatches, add_facts
from tests.attention.families import build, full, packed, padded
from tests.attention.test_families import ONLY
from tests.attention.test_masks import LENGTH, Reads, create, padding
from tests.attention.training import left_padded
from tests.calls import recorded_calls
from tests.steps import step_with
from tests.trainers.builders import causal, losses_and_norms, sft

MODELS = ("llama", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_moe")
BATCHES = {
    "whole": lambda: without_mask(full()),
    "ones": full,
    "left": lambda: padded("left"),
    "right": lambda: padded("right"),
    "packed": packed,
}


def without_mask(batch):
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def padding_known(mask: torch.Tensor, bounds: Any) -> contextlib.AbstractContextManager[None]:
    return step_with(padding=Padding(mask, mask._version, bounds))


def made(name: str) -> Any:
    model = build(name, None if name in ("llama", "qwen3_moe") else 5).train()
    apply_liger_kernel(model, {**ONLY, "linear_cross_entropy": True})
    return model


def trained(model: Any, batch: dict[str, Any], context: Any = None) -> tuple[list[torch.Tensor], int]:
    """The loss and the gradients, and how often the forward reads a tensor of the device."""
    model.gradient_checkpointing_enable()
    with Reads() as reads, context or contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [loss.detach(), *gradients], reads.number


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", BATCHES)
def test_nothing_changes_but_the_reads(name, kind, monkeypatch):
    results = []
    for known in (False, True):
        batch = BATCHES[kind]()  # position ids that were read once are not read again
        with monkeypatch.context() as patch:
            context, looked = None, recorded_calls(patch, interface, "_find")  # in checkpoints too
            if not known:
                patch.setattr(head_forward, "rows_of", lambda *given: None)
            elif "attention_mask" in batch:
                context = padding_known(batch["attention_mask"], bounds_of(batch["attention_mask"]))
            results.append(trained(made(name), batch, context))
    (expected, without), (found, reads) = results
    assert all(map(torch.equal, found, expected))
    assert reads == (without if kind == "packed" else 0)
    assert bool(looked) == (kind == "packed")
    assert without > 0 or (name, kind) == ("llama4_text", "whole"), "its masks and layers are told no position ids"


def test_another_tensor_is_read():
    """A mask that is not the one that was read, or that was written to since."""
    model = made("llama")
    batch = padded("left")
    mask, wrong = batch["attention_mask"], [(0, 12)] * 3
    expected = trained(model, batch)[0][0]
    with padding_known(mask, wrong):
        assert not torch.equal(model(**batch).loss, expected), "it is taken where it may be"
        assert torch.equal(model(**{**batch, "attention_mask": mask.clone()}).loss, expected)
        mask.mul_(1)
        assert torch.equal(model(**batch).loss, expected)
    assert current_step().rows is None


def test_another_mask_of_the_same_forward_is_read():
    """Such as one of a vision tower: it has other rows."""
    mask, other = padding((0, 5), (0, 0)), padding((0, 0, 5), (0, 0, 0))
    model = build("llama")
    with padding_known(mask, [(0, LENGTH), (0, LENGTH)]):
        rows = rows_of(current_step(), model, type(model).forward, (), {"attention_mask": mask})
    with step_with(rows=rows):
        assert create("full", attention_mask=mask) is None, "the bounds are taken as they are given"
        found = create("full", batch=3, attention_mask=other).offsets.tolist()
        assert found[-3:] == [2 * LENGTH, 2 * LENGTH + 5, 3 * LENGTH]


def test_facts_are_those_of_the_last_step(monkeypatch):
    mask, known = padding((0, 5), (0, 0)), KnownBatches()
    batches = [{"labels": torch.zeros_like(mask), "attention_mask": mask.clone()} for _ in range(2)]
    for batch in batches:
        add_facts(batch)
        known.take([batch])
    for batch, forgotten in zip(batches, (True, False)):
        counted = recorded_calls(monkeypatch, trainer_step, "count_later")
        step = known.added_to(Step(), batch, count_labels=True)
        assert bool(counted) == forgotten
        assert (step.padding is None) == forgotten


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids", "decoder_attention_mask", "past_key_values"])
def test_arguments_that_may_tell_more_are_not_ignored(name):
    model = build("llama")
    forward = type(model).forward
    for args, kwargs in (((1,), {}), ((), {"input_ids": 1, "labels": 2}), ((), {name: None})):
        assert rows_of(current_step(), model, forward, args, kwargs) is not None
    assert rows_of(current_step(), model, forward, (1,), {name: torch.ones(1)}) is None


class OwnModel(LlamaForCausalLM):
    """A model of a user's, which finds the documents of packed rows itself."""

    def forward(self, input_ids=None, **kwargs):
        positions = packed()["position_ids"]
        return super().forward(input_ids=input_ids, position_ids=positions, use_cache=False, **kwargs)


class OwnBase(LlamaModel):
    """The same one level below."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **{**kwargs, "position_ids": packed()["position_ids"]})


@pytest.mark.parametrize("own", [OwnModel, OwnBase])
def test_position_ids_of_a_users_model_are_read(own):
    batch = packed()
    expected = trained(made("llama"), batch)[0][0]
    del batch["position_ids"], batch["use_cache"]
    model = made("llama")
    assert not torch.equal(trained(model, batch)[0][0], expected)
    model = build("llama").train()
    changed = model if own is OwnModel else model.model
    changed.__class__ = own
    model.config.use_cache = False
    apply_liger_kernel(model, {**ONLY, "linear_cross_entropy": True})
    assert torch.equal(trained(model, batch)[0][0], expected)


def unread(mask):
    raise AssertionError("the trainer's mask is read back")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer_of", [causal, sft])
def test_trainers_know_the_padding_of_their_batches(trainer_of, tmp_path, monkeypatch):
    options = {"max_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    if trainer_of is causal:
        options["rows"] = left_padded()
    plain = trainer_of(tmp_path / "plain", build("llama"), **options)
    monkeypatch.setattr(
        plain._known_batches, "take", lambda batches: [batch.pop("liger_trainer_facts") for batch in batches]
    )
    plain.train()
    expected = losses_and_norms(plain)
    monkeypatch.setattr(masks, "bounds_of", unread)
    with pytest.raises(AssertionError, match="is read back"):
        plain.train()
    knowing = trainer_of(tmp_path / "knowing", build("llama"), **options)
    knowing.train()
    assert losses_and_norms(knowing) == expected
