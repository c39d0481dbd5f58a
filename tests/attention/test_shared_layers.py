"""Layers that have the keys of earlier ones, or whose keys are their values: small models of Gemma 4 and Gemma 3n.

Logits and all gradients are those of the model as transformers has it, also where a number of last logits is asked for:
its last layers then run on as many tokens, and ours on all.
"""

from __future__ import annotations

import copy
import functools
import io
import types
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.attention import interface
from liger_trainer.compat.transformers import CUT_SHARED_LAYERS
from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.patching import shared_layers
from liger_trainer.patching.shared_layers import METHOD, cuts_to_last_tokens
from liger_trainer.tools.canaries import cut_shared_layers
from tests.attention.families import BATCHES, packed
from tests.attention.shared_layers import MODELS, batch_of, build
from tests.attention.test_families import NOISE, ONLY, attention_rows, documents_alone, eager
from tests.patching.comparisons import assert_same, loss_and_gradients

CUTTING = ("E2B", "wide heads", "unified")
models = pytest.mark.parametrize("name", MODELS)


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """The same weights with eager attention, and with our attention and rotations."""
    model = build(name)
    theirs = eager(model)
    rows = list(apply_liger_kernel(model, {**ONLY, "rope": True, "rms_norm": True}))
    assert all(row.applied for row in rows if row.component in ("attention", "rope")), rows
    return theirs, model


def last_logits(model: Any, batch: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
    """The last `count` logits of each row (all for 0) but those of padding, and the gradients of a sum of them."""
    model.zero_grad(set_to_none=True)
    given = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**{**given, "use_cache": False}, logits_to_keep=count).logits
    is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, -count:].bool()
    assert logits.shape[:2] == is_token.shape
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights * is_token[..., None]).sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()[is_token], **gradients}


@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("kind", BATCHES)
@models
def test_last_logits_and_gradients_equal_those_of_eager(name, kind, count, monkeypatch):
    theirs, ours = pair(name)
    monkeypatch.setattr(interface, "use_triton", lambda query: True)
    batch = batch_of(kind)
    assert_same(last_logits(ours, batch, count), last_logits(theirs, batch, count), floor=NOISE)


@pytest.mark.parametrize("devices", [("cpu",), ()], ids=["plan", "unmasked"])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_where_no_mask_is_needed_causality_begins_at_the_first_key(count, devices, monkeypatch):
    """Rows without padding, and windows that are longer: nothing is masked, and torch would begin at the query."""
    monkeypatch.setattr(interface, "TRITON_DEVICES", devices)
    model = build("E2B", sliding_window=64)
    theirs = eager(model)
    apply_liger_kernel(model, ONLY)
    batch = batch_of("full")
    masks: list[Any] = []
    with model.model.layers[-1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    ):
        found = last_logits(model, batch, count)
    assert [mask is None or mask.masks_nothing for mask in masks] == [True]
    assert (masks[0] is None) == (not devices)
    assert_same(found, last_logits(theirs, batch, count), floor=NOISE)


@pytest.mark.parametrize("kind", ["left-padded", "packed"])
@models
def test_checkpointed_layers(name, kind):
    _, ours = pair(name)
    batch = batch_of(kind)
    expected = loss_and_gradients(ours, batch)
    model = copy.deepcopy(ours)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model, batch), expected, floor=NOISE)


@models
def test_packed_documents_equal_documents_alone(name):
    theirs, ours = pair(name)
    batch = packed()
    batch["input_ids"] = batch["input_ids"].clamp_min(1)
    assert_same(loss_and_gradients(ours, batch), documents_alone(theirs, batch), floor=NOISE)


@pytest.mark.parametrize("name", CUTTING)
def test_masks_that_are_tensors_are_cut_as_the_model_cuts_them(name):
    """As those of images, or of a generation that goes on."""
    theirs, ours = pair(name)
    batch = batch_of("full")
    length = batch["input_ids"].shape[1]
    causal = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    causal[..., 5:, :3] = False
    mask = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    batch["attention_mask"] = {"full_attention": mask, "sliding_attention": mask}

    def logits(model: Any) -> torch.Tensor:
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=6).logits

    lengths: list[int] = []
    last = ours.model.layers[-1]
    with last.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1])):
        found = logits(ours)
    assert lengths == [6]
    torch.testing.assert_close(found, logits(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CUTTING)
def test_the_report_names_what_is_bound_and_revert_takes_it_out(name):
    model = build(name)
    expected = last_logits(model, batch_of("full"), 6)
    rows = attention_rows(apply_liger_kernel(model, ONLY))
    kind = type(model.model).__name__
    assert [row.target for row in rows if row.kernel == "labelled tokens alone in training"] == [f"{METHOD} in {kind}"]
    assert METHOD in model.model.__dict__
    revert_liger_kernel(model)
    assert METHOD not in model.model.__dict__
    assert_same(last_logits(model, batch_of("full"), 6), expected, floor=NOISE)


@pytest.mark.parametrize("name", ["31B", "3n"])
def test_nothing_is_bound_where_nothing_is_cut(name):
    _, ours = pair(name)
    assert METHOD not in ours.model.__dict__


def test_copies_have_a_method_of_their_own():
    _, ours = pair("E2B")
    copied = copy.deepcopy(ours)
    assert copied.model.__dict__[METHOD].__self__ is copied.model
    revert_liger_kernel(copied)
    assert METHOD not in copied.model.__dict__
    assert METHOD in ours.model.__dict__
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    read = torch.load(stored, weights_only=False)
    batch = batch_of("left-padded")
    assert_same(last_logits(read, batch, 6), last_logits(ours, batch, 6), floor=NOISE)


def test_a_method_that_somebody_has_put_in_stays():
    model = build("E2B")
    method = types.MethodType(getattr(Gemma4TextModel, METHOD), model.model)
    model.model.__dict__[METHOD] = method
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert row.reason.endswith("treats masks by the name of the attention, and does not know ours")
    revert_liger_kernel(model)
    assert model.model.__dict__[METHOD] is method


class _CutsTheFirst(Gemma4TextModel):
    def _maybe_slice_kv_shared_inputs(
        self, hidden_states, per_layer_inputs, position_embeddings, causal_mask_mapping, logits_to_keep, cache, **kwargs
    ):
        if self.config._attn_implementation == "flex_attention":
            return hidden_states, per_layer_inputs, position_embeddings, causal_mask_mapping
        first = slice(logits_to_keep or None)
        tables = {kind: tuple(each[:, first] for each in pair) for kind, pair in position_embeddings.items()}
        masks = {kind: mask[:, :, first] for kind, mask in causal_mask_mapping.items()}
        return hidden_states[:, first], per_layer_inputs[:, first], tables, masks


class _CutsMore(Gemma4TextModel):
    def _maybe_slice_kv_shared_inputs(self, hidden_states, causal_mask_mapping, chosen, logits_to_keep, **kwargs):
        return hidden_states, causal_mask_mapping, self.config._attn_implementation


@pytest.mark.parametrize("kind", [_CutsTheFirst, _CutsMore])
def test_another_cut_is_left_alone(kind):
    model = build("E2B")
    model.model.__class__ = kind
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert row.reason == f"{kind.__name__}.{METHOD} treats masks by the name of the attention, and does not know ours"


def test_plans_reach_all_layers():
    """Or the comparisons above would be of transformers' masks."""
    _, ours = pair("E2B")
    received: list[Any] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: received.append((kwargs["attention_mask"], kwargs["hidden_states"].shape[1])),
            with_kwargs=True,
        )
        for layer in ours.model.layers
    ]
    batch = batch_of("left-padded")
    last_logits(ours, batch, 6)
    for hook in hooks:
        hook.remove()
    assert len(received) == 6
    assert all(isinstance(mask, AttentionPlan) and length == batch["input_ids"].shape[1] for mask, length in received)


def test_the_canary_sees_another_cut(monkeypatch):
    assert CUT_SHARED_LAYERS.canary is not None
    assert cut_shared_layers() is None
    monkeypatch.setattr(Gemma4TextModel, METHOD, getattr(_CutsTheFirst, METHOD))
    assert cut_shared_layers() == "Gemma 4 cuts what its last layers are given in another way than we know"


def test_without_the_private_name_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(shared_layers, "available", lambda feature: feature is not CUT_SHARED_LAYERS)
    assert not cuts_to_last_tokens(Gemma4TextModel, AutoConfig.for_model("gemma4_text"), "eager")


@pytest.mark.parametrize("name", ["E2B", "unified", "3n"])
@pytest.mark.parametrize("other", ["its object", "a copy", "the model"])
@pytest.mark.parametrize("kept", [0, 6])
def test_a_model_with_the_config_of_a_patched_one(name, other, kept):
    """Whose own method takes parts of the masks of plans; a copy of the model has ours."""
    model = build(name)
    expected = copy.deepcopy(model)
    expected.set_attn_implementation("eager")
    apply_liger_kernel(model)
    config = copy.deepcopy(model.config) if other == "a copy" else model.config
    found = copy.deepcopy(model) if other == "the model" else type(model)(config).float().train()
    found.load_state_dict(expected.state_dict())
    for kind in ("full", "left-padded", "packed"):
        inputs = {key: value for key, value in batch_of(kind).items() if key != "labels"}
        options = {**inputs, "use_cache": False, "logits_to_keep": kept}
        rows = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()[:, -kept:]
        ours, theirs = (each(**options).logits[rows] for each in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
