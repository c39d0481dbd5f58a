"""Layers that mix tokens by a recurrence or a short convolution: whole models, documents, calls, what is left alone."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
from torch import nn

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.kernels.documents import documents_of
from liger_trainer.patching.binding import bound_function
from liger_trainer.patching.recurrent.documents import KEYWORD
from liger_trainer.patching.recurrent.find import mixers_of
from liger_trainer.patching.recurrent.mixers import is_depthwise, precisions_of
from liger_trainer.patching.trial import Trial
from tests.kernels.document_places import places
from tests.patching import comparisons
from tests.patching.comparisons import LAYERS
from tests.patching.mixing_models import FIELDS, ROWS, UNPACKED, built, component_of, mixers

families = pytest.mark.parametrize("name", FIELDS)
packed_families = pytest.mark.parametrize("name", [name for name in FIELDS if name not in UNPACKED])
LENGTHS = (13, 1, 2, 17)
OPTIONS = {"use_cache": False}


def batch_of(padding=""):
    ids = torch.randint(3, 120, (3, 20))
    mask = torch.ones_like(ids)
    for row, hidden in enumerate(
        {"left": ((0, 7), (0, 3)), "right": ((11, 20), (18, 20)), "between": ((5, 9),)}.get(padding, ())
    ):
        mask[row, slice(*hidden)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, **OPTIONS, **({"attention_mask": mask} if padding else {})}


@families
@pytest.mark.parametrize("padding", ["", "left", "right", "between"])
def test_loss_and_gradients_are_the_models(name, padding):
    model, batch = built(name), batch_of(padding)
    expected = comparisons.loss_and_gradients(model, batch)
    report = apply_liger_kernel(model, LAYERS)
    target, kernel, count = ROWS[name]
    (row,) = (each for each in report if each.target == target)
    assert (row.component, row.kernel, row.count) == (component_of(name), kernel, count)
    comparisons.assert_same(comparisons.loss_and_gradients(model, batch), expected, floor=5e-8)
    assert revert_liger_kernel(model) > 0
    assert not any("forward" in vars(module) for module in model.modules())
    comparisons.assert_same(comparisons.loss_and_gradients(model, batch), expected)


def test_another_draw_is_made_where_the_rounding_under_autocast_is_unlucky(monkeypatch):
    draws = iter((False, True))
    monkeypatch.setattr(Trial, "under_autocast", lambda *args: next(draws))
    model = built("lfm2")
    apply_liger_kernel(model, LAYERS)
    assert {precisions_of(bound_function(module)).autocast for module in mixers(model)} == {True}
    assert next(draws, None) is None


def test_the_report_says_that_a_mixer_is_not_ours_under_autocast(monkeypatch):
    monkeypatch.setattr(Trial, "under_autocast", lambda *args: False)
    report = apply_liger_kernel(built("lfm2"), LAYERS)
    assert {row.reason for row in report if row.component == "short_conv"} == {
        "under autocast its class's own code runs"
    }


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2"])
def test_a_convolution_whose_bias_came_or_went_runs_as_written(name):
    models = built(name).eval(), built(name).eval()
    apply_liger_kernel(models[0], LAYERS)
    for layer in itertools.chain(*map(mixers, models)):
        conv = next(filter(is_depthwise, layer.children()))
        conv.bias = nn.Parameter(torch.linspace(-1.0, 1.0, conv.out_channels)) if conv.bias is None else None
    ids = torch.randint(3, 120, (2, 9))
    with torch.no_grad():
        ours, theirs = (model(ids, **OPTIONS).logits for model in models)
    torch.testing.assert_close(ours, theirs)


def test_a_layer_that_would_step_aside_in_float16_is_left_alone():
    report = apply_liger_kernel(built("nemotron_h", torch.float16), LAYERS)
    (row,) = (each for each in report if each.target == ROWS["nemotron_h"][0])
    assert row.kernel is None
    assert row.reason == "in float16, large numbers overflow elsewhere than in its class's own forward"


def packed(kind):
    """A row of several documents as a collator gives it."""
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    lengths = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    told = {"position_ids": positions}
    if kind != "positions":
        told |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **lengths}
    if kind == "numbers":
        told["seq_idx"] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    return told


@packed_families
@pytest.mark.parametrize("kind", ["positions", "offsets", "numbers"])
def test_documents_of_a_row_are_computed_alone(name, kind):
    model, ids = built(name).eval(), torch.randint(3, 120, (1, sum(LENGTHS)))
    with torch.no_grad():
        alone = [model(each, **OPTIONS).logits for each in ids.split(LENGTHS, 1)]
        apply_liger_kernel(model, LAYERS)
        together = model(ids, **packed(kind), **OPTIONS).logits
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@packed_families
@pytest.mark.parametrize("reentrant", [False, True])
def test_documents_are_known_in_the_recomputation(name, reentrant):
    model, ids = built(name).train(), torch.randint(3, 120, (1, sum(LENGTHS)))
    apply_liger_kernel(model, LAYERS)
    batch = {"input_ids": ids, "labels": ids, **packed("positions"), **OPTIONS}
    expected = comparisons.loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    comparisons.assert_same(comparisons.loss_and_gradients(model, batch), expected)


@families
def test_generation_is_the_models(name):
    model, ids = built(name).eval(), torch.randint(3, 120, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    apply_liger_kernel(model, LAYERS)
    assert torch.equal(model.generate(ids, **options), expected)


@families
def test_layers_are_found_and_ours(name):
    model = built(name)
    assert mixers_of(model) == mixers(model)
    assert mixers(model)


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_no_worse_under_autocast_and_in_bfloat16(name, dtype):
    def batch(model, seed):
        ids = torch.randint(3, 120, (2, 70), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    def under():
        return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32)

    model = built(name, dtype)
    model.config.use_cache = False
    alone = {**dict.fromkeys(KERNEL_KEYS, False), component_of(name): True}
    comparisons.assert_as_near_to_the_truth(model, alone, batch, under)


# ---------------------------------------------------------------------------------------------------------------------
# One layer
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def layer():
    """A layer with our forward, and the same without."""
    model = built("lfm2")
    (plain,) = mixers(model)
    plain = copy.deepcopy(plain)
    apply_liger_kernel(model, LAYERS)
    return mixers(model)[0], plain


def test_every_way_to_call_a_layer(layer):
    ours, plain = layer
    x, mask = torch.randn(2, 5, 32), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 1]])
    for call in (
        lambda each: each(x),
        lambda each: each(x, None, mask),
        lambda each: each(hidden_states=x, attention_mask=mask),
        lambda each: each(x, cache=None, position_ids=None),
    ):
        torch.testing.assert_close(call(ours), call(plain))


def test_a_mask_is_not_looked_at_beside_documents(layer):
    """In a packed row it holds counts."""
    ours, _ = layer
    x, documents = torch.randn(1, 7, 32), documents_of([3, 4])
    with torch.no_grad():
        alone = torch.cat([ours(x[:, :3]), ours(x[:, 3:])], 1)
        torch.testing.assert_close(ours(x, attention_mask=torch.full((1, 7), 5), **{KEYWORD: documents}), alone)


@pytest.mark.parametrize("reason", ["float64", "offloaded"])
def test_a_layer_that_cannot_be_ours_runs_as_it_is_and_says_so_in_a_packed_row(layer, reason, caplog):
    ours, plain = layer
    x = torch.randn(1, 7, 32)
    if reason == "float64":
        ours, plain, x = ours.double(), plain.double(), x.double()
    else:
        ours.conv._hf_hook = type("Hook", (), {"pre_forward": lambda *_: None, "post_forward": lambda *_: None})()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(ours(x), plain(x))
        assert not caplog.records
        assert torch.equal(ours(x, **{KEYWORD: documents_of([3, 4])}), plain(x))
    assert "mixes the documents of a packed row" in caplog.text


def test_a_model_that_tells_its_layers_of_no_documents_says_so(caplog):
    model, ids = built("inkling_text").eval(), torch.randint(3, 120, (1, sum(LENGTHS)))
    apply_liger_kernel(model, LAYERS)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        model(ids, **OPTIONS)
        assert "mixes the documents" not in caplog.text
        model(ids, **packed("positions"), **OPTIONS)
    assert "mixes the documents of a packed row: its model does not tell it of them" in caplog.text


def test_switched_off_is_left_alone():
    (row,) = (
        each
        for each in apply_liger_kernel(built("lfm2"), {**LAYERS, "short_conv": False})
        if each.component == "short_conv"
    )
    assert not row.applied
    assert row.reason == "switched off in liger_kernel_config"


class _Sum(nn.Module):
    """Adds where LFM2 multiplies."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=2)

    def forward(self, hidden_states, cache=None, attention_mask=None):
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
        before, after, x = self.in_proj(hidden_states).mT.chunk(3, 1)
        mixed = nn.functional.conv1d(
            before + x, self.conv.weight, self.conv.bias, padding=2, groups=len(self.conv.weight)
        )
        return self.out_proj((after * mixed[..., : x.shape[-1]]).mT)


def test_another_formula_is_left_alone():
    (row,) = (each for each in apply_liger_kernel(nn.ModuleList([_Sum()]), LAYERS) if each.component == "short_conv")
    assert not row.applied
    assert row.reason.startswith("it computes another function than C * conv(B * x)")


def test_segments_of_a_packed_row_are_documents():
    from liger_trainer.packing.layout import Segment
    from liger_trainer.packing.packed_row import packed_rows
    from tests.packing.batches import rows_of_tokens

    common = [5, 6, 7]
    (row,) = packed_rows(rows_of_tokens([*common, 8, 9], [*common, 4], [3, 3], common).padded(), share=True)
    assert row.layout.segments[0] == Segment(0, 3)
    assert sorted(places(row.documents)) == [(0, 3, -1), (3, 5, 0), (5, 6, 0), (6, 8, -1)]
    assert row.documents is row.documents
    turns = rows_of_tokens(common, [*common, 8, 9], [*common, 8, 9, 4]).padded()
    (row,) = packed_rows(turns, share=True, one_level=True)
    assert sorted(places(row.documents)) == [(0, 3, -1), (3, 6, 0), (6, 8, 0)]
    (row,) = packed_rows(turns, share=True)
    with pytest.raises(ValueError, match="no parent may have a parent"):
        row.documents  # noqa: B018
