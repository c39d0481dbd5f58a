"""Whole models: loss and every gradient with our attention are those of the model's own eager attention."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.attention import interface
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.kernels.attention.attention import attention
from liger_trainer.kernels.attention.plan import AttentionPlan
from tests.attention.families import (
    BATCHES,
    LEFT_ALONE,
    LENGTH,
    TAKEN,
    WINDOWS,
    Batch,
    build,
    documents,
    full,
    packed,
    padded,
)
from tests.patching.comparisons import assert_same, loss_and_gradients, relative, total_error

ONLY = {**dict.fromkeys(KERNEL_KEYS, False), "attention": True}
OURS = "liger_trainer"
NOISE = 1e-6
"""The share of the largest gradient that is rounding: keys' biases, which a softmax does not see, have no other."""

CASES = [
    pytest.param(name, window, id=f"{name}, window {window}" if window else name)
    for name, family in TAKEN.items()
    for window in (WINDOWS if family.window else (None,))
]
cases = pytest.mark.parametrize(("name", "window"), CASES)
taken = pytest.mark.parametrize("name", TAKEN)
SOME = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4_text")
"""One of each kind: full, windowed, soft-capped, with a vision tower, with sinks, and chunked."""
some = pytest.mark.parametrize("name", SOME)


def attention_rows(report) -> list[Any]:
    return [row for row in report if row.component == "attention"]


def language_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The part whose configuration names the attention of its layers."""
    return model.get_decoder()


def implementation(model: PreTrainedModel) -> str:
    return language_attention(model).config._attn_implementation


def eager(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that runs its own eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


def patched(model: PreTrainedModel) -> PreTrainedModel:
    report = apply_liger_kernel(model, ONLY)
    assert [row.applied for row in attention_rows(report)] == [True], str(report)
    assert implementation(model) == OURS
    return model


@functools.cache
def pair(name: str, window: int | None) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same weights with eager attention and with ours; the comparisons do not change them."""
    model = build(name, window).train()
    return eager(model), patched(model)


@contextlib.contextmanager
def masks_received(model: PreTrainedModel) -> Iterator[list[Any]]:
    """What every attention module of the language model gets as its mask, while the context lasts."""
    received: list[Any] = []

    def record(module, args, kwargs):
        arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        received.append(arguments["attention_mask"])

    modules = [module for module in language_attention(model).modules() if type(module).__name__.endswith("Attention")]
    assert len(modules) == model.config.get_text_config().num_hidden_layers
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    yield received
    for hook in hooks:
        hook.remove()


def documents_alone(model: PreTrainedModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Loss and gradients of the documents of a packed batch, each in a forward of its own."""
    targets = (batch["labels"][:, 1:] != -100).sum()
    model.zero_grad(set_to_none=True)
    losses = []
    for document in documents(batch):
        losses.append(model(**document, num_items_in_batch=targets).loss)
        losses[-1].backward()
    loss = torch.stack(losses).sum().detach()
    return {"loss": loss, **{key: p.grad for key, p in model.named_parameters() if p.grad is not None}}


def assert_equal(theirs: PreTrainedModel, ours: PreTrainedModel, name: str, batch: Batch) -> None:
    """Loss and all gradients; packed documents, where the model itself sees those beside them, are run alone."""
    alone = "position_ids" in batch and not TAKEN[name].positions
    expected = documents_alone(theirs, batch) if alone else loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)


def count_calls_of_the_function(monkeypatch: pytest.MonkeyPatch) -> list[AttentionPlan]:
    """The plans with which our own function runs from now on."""
    calls = []

    def counted(*args, plan, **kwargs):
        calls.append(plan)
        return attention(*args, plan=plan, **kwargs)

    monkeypatch.setattr(interface, "attention", counted)
    return calls


@cases
@pytest.mark.parametrize("kind", BATCHES)
def test_loss_and_gradients_equal_those_of_eager(name, window, kind, monkeypatch):
    """Through our own function, as on devices where it has kernels."""
    theirs, ours = pair(name, window)
    calls = count_calls_of_the_function(monkeypatch)
    monkeypatch.setattr(interface, "use_triton", lambda query: True)
    with masks_received(ours) as received:
        assert_equal(theirs, ours, name, BATCHES[kind]())
    layers = ours.config.get_text_config().num_hidden_layers
    assert len(received) == layers
    assert all(mask is None or isinstance(mask, AttentionPlan) for mask in received), received
    # Whole rows are for torch's own attention, which knows neither soft-caps nor sinks.
    assert len(calls) == layers or (kind in ("full", "right-padded") and name not in ("gemma2", "gpt_oss")), calls


@some
@pytest.mark.parametrize("kind", BATCHES)
def test_where_there_are_no_kernels_each_call_makes_a_mask(name, kind, monkeypatch):
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    calls = count_calls_of_the_function(monkeypatch)
    monkeypatch.setattr(interface, "use_triton", lambda query: False)
    assert_equal(theirs, ours, name, BATCHES[kind]())
    assert not calls


def on(device: str, batch: Batch) -> Batch:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_through_the_kernels(name, device, monkeypatch):
    theirs, ours = (copy.deepcopy(model).to(device) for model in pair(name, 3))
    calls = count_calls_of_the_function(monkeypatch)
    for kind in ("left-padded", "packed"):
        assert_equal(theirs, ours, name, on(device, BATCHES[kind]()))
    assert len(calls) == 2 * ours.config.num_hidden_layers


@cases
def test_packed_documents_equal_documents_alone(name, window):
    theirs, ours = pair(name, window)
    batch = packed()
    expected = documents_alone(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)
    assert_same(documents_alone(ours, batch), expected, floor=NOISE)


@pytest.mark.parametrize("name", [name for name, family in TAKEN.items() if family.window])
def test_another_window_gives_other_gradients(name):
    """Otherwise the comparisons above would not see a window that is ignored."""
    one, other = (loss_and_gradients(pair(name, window)[1], full()) for window in WINDOWS)
    assert total_error(one, other) > 0.01


IMAGE = 122  # its token in the tiny model of `tests.tiny_models`


def image_batch(kind: str) -> Batch:
    """One image of four tokens in the first two rows, in the middle of a document."""
    batch = BATCHES[kind]()
    batch["input_ids"][:2, 5:9] = IMAGE
    if kind == "left-padded":
        batch["input_ids"][1] = batch["input_ids"][1].roll(2)  # behind the padding
        batch["input_ids"][1, :4] = 0
    if kind == "right-padded":
        batch["input_ids"][1] = batch["input_ids"][1].roll(-2)
        batch["input_ids"][1, -4:] = 0
    image = batch["input_ids"] == IMAGE
    assert image.sum() == 8
    batch["labels"][image] = -100
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {**batch, "token_type_ids": image.long(), "pixel_values": pixels}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["full", "right-padded", "left-padded", "packed"])
def test_an_image_attends_in_both_directions(kind, window):
    theirs, ours = pair("gemma3", window)
    batch = image_batch(kind)
    expected = loss_and_gradients(theirs, batch)
    assert any("vision" in name for name in expected)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)
    causal = loss_and_gradients(theirs, {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])})
    of_text = [name for name in expected if "language_model" in name]
    assert max(relative(expected[name], causal[name]) for name in of_text) > 1e-5


@pytest.mark.parametrize("kind", BATCHES)
def test_text_that_a_processor_marked_as_such(kind):
    """`token_type_ids` of zeros say that nothing is an image."""
    theirs, ours = pair("gemma3", 3)
    batch = BATCHES[kind]()
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    expected = loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)


def test_a_vision_tower_keeps_its_attention():
    model = build("gemma3", 3)
    before = model.model.vision_tower.config._attn_implementation
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert row.target == "Gemma3Attention"
    assert "images" in row.reason, "what the masks of images are left to is said"
    assert model.model.vision_tower.config._attn_implementation == before != OURS
    assert model.model.language_model.config._attn_implementation == OURS


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_with_one_reason(name):
    model = build(name).train()
    batch = full()
    expected = loss_and_gradients(model, batch)
    before = model.config._attn_implementation
    rows = attention_rows(apply_liger_kernel(model, ONLY))
    assert [row.applied for row in rows] == [False] * (name != "bert"), "an encoder has nothing of the kind"
    assert all(row.reason and "\n" not in row.reason for row in rows)
    assert model.config._attn_implementation == before
    got = loss_and_gradients(model, batch)
    assert all(torch.equal(got[key], value) for key, value in expected.items())


def test_an_attention_that_changes_its_mask_is_left_alone(monkeypatch):
    """As sparse ones do, which hide keys from it; without a mask they may not."""
    original = LlamaAttention.forward

    @functools.wraps(original)
    def forward(self, *args, attention_mask=None, **kwargs):
        attention_mask = None if attention_mask is None else copy.deepcopy(attention_mask)
        return original(self, *args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    (row,) = attention_rows(apply_liger_kernel(build("llama"), ONLY))
    assert row.reason == "it changes its mask before it calls its attention function"


@pytest.mark.parametrize("chosen", ["eager", "flex_attention", "flash_attention_2", "flash_attention_3"])
def test_what_the_user_chose_stays(chosen):
    model = build("llama")
    model.config._attn_implementation = chosen  # as loading with it does, where it is installed
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert not row.applied
    assert chosen in row.reason
    assert model.config._attn_implementation == chosen


def test_what_the_user_switched_off_stays():
    model = build("llama")
    report = apply_liger_kernel(model, {**ONLY, "attention": False})
    assert [row.reason for row in attention_rows(report)] == ["switched off in liger_kernel_config"]
    assert implementation(model) == "sdpa"


@pytest.mark.parametrize("chosen", [None, "sdpa"])
def test_what_a_user_may_load_with_is_taken(chosen):
    model = AutoModelForCausalLM.from_config(build("llama").config, attn_implementation=chosen)
    patched(model)


def test_a_model_with_the_config_of_a_patched_one():
    """As TRL makes its references: what it inherits is ours, and stays to be reverted."""
    theirs, _ = pair("llama", None)
    config = patched(build("llama")).config
    gc.collect()  # the patched model lives in a circle, and a config keeps our name as long as one lives
    model = type(theirs)(config).train()
    model.load_state_dict(theirs.state_dict())
    batch = padded("left")
    expected = loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(patched(model), batch), expected, floor=NOISE)
    revert_liger_kernel(model)
    assert implementation(model) == "sdpa"


@some
def test_revert_restores_exactly(name):
    model = build(name, 3 if TAKEN[name].window else None).train()
    batch = padded("left")
    before, expected = implementation(model), loss_and_gradients(model, batch)
    forwards = {key for key, module in model.named_modules() if "forward" in vars(module)}
    patched(model)
    revert_liger_kernel(model)
    assert implementation(model) == before != OURS
    assert {key for key, module in model.named_modules() if "forward" in vars(module)} == forwards
    got = loss_and_gradients(model, batch)
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    assert revert_liger_kernel(model) == 0


@some
def test_applying_twice_is_applying_once(name):
    model = build(name, 3 if TAKEN[name].window else None)
    first = apply_liger_kernel(model, ONLY)
    assert apply_liger_kernel(model, ONLY) == first
    revert_liger_kernel(model)
    assert implementation(model) != OURS


@some
def test_all_kernels_together(name):
    window = 3 if TAKEN[name].window else None
    theirs, _ = pair(name, window)
    model = build(name, window).train()
    assert [row.applied for row in attention_rows(apply_liger_kernel(model))] == [True]
    for kind in ("left-padded", "packed"):
        assert_equal(theirs, model, name, BATCHES[kind]())


@taken
@torch.no_grad()
def test_evaluation(name):
    theirs, ours = (copy.deepcopy(model).eval() for model in pair(name, 3 if TAKEN[name].window else None))
    for batch in (full(), padded("left")):
        expected, got = (model(**batch) for model in (theirs, ours))
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(got.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)


def generated(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    batch = padded("left")
    inputs = {key: batch[key][:2] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, **options)


@taken
def test_generation_with_a_cache(name):
    theirs, ours = (copy.deepcopy(model).eval() for model in pair(name, 3 if TAKEN[name].window else None))
    expected = generated(theirs)
    assert torch.equal(generated(ours), expected)
    assert torch.equal(generated(ours, use_cache=False), expected)


@some
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 2}], ids=["static", "beams"])
def test_other_ways_to_generate(name, options):
    theirs, ours = (copy.deepcopy(model).eval() for model in pair(name, 3 if TAKEN[name].window else None))
    options = {**options, "disable_compile": True}
    assert torch.equal(generated(ours, **options), generated(theirs, **options))


@some
@torch.no_grad()
def test_a_sequence_in_two_parts(name):
    """Prefilling in chunks: the second forward has several queries behind a cache that is not empty."""
    theirs, ours = (copy.deepcopy(model).eval() for model in pair(name, 8 if TAKEN[name].window else None))
    batch = padded("left")
    logits = []
    for model in (theirs, ours):
        first = model(batch["input_ids"][:2, :7], attention_mask=batch["attention_mask"][:2, :7], use_cache=True)
        assert first.past_key_values is not None
        past = {"past_key_values": first.past_key_values, "attention_mask": batch["attention_mask"][:2]}
        logits.append(model(batch["input_ids"][:2, 7:], **past).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


def test_output_attentions_behaves_as_with_sdpa():
    theirs, ours = build("llama").eval(), patched(build("llama")).eval()
    batch = {"input_ids": full()["input_ids"], "output_attentions": True}
    expected, got = (model(**batch).attentions for model in (theirs, ours))
    assert expected is None or all(one is None for one in expected)
    assert got == expected
    for model in (theirs, ours):
        with pytest.raises(ValueError, match="output_attentions"):
            model.config.output_attentions = True


@some
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_patched_and_work(name, how):
    window = 3 if TAKEN[name].window else None
    theirs, _ = pair(name, window)
    model = patched(build(name, window).train())
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    batch = padded("left")
    expected = loss_and_gradients(theirs, batch)
    with masks_received(copied) as received:
        assert_same(loss_and_gradients(copied, batch), expected, floor=NOISE)
    # A pickle is without our attention, as it is without our forwards.
    assert all(isinstance(mask, AttentionPlan) for mask in received) is (how == "deepcopy")


def test_reverting_a_model_leaves_its_copy():
    model = patched(build("llama").train())
    copied = copy.deepcopy(model)
    revert_liger_kernel(model)
    assert (implementation(model), implementation(copied)) == ("sdpa", OURS)
    revert_liger_kernel(copied)
    assert implementation(copied) == "sdpa"


@some
def test_a_saved_model_has_no_trace_of_it(name, tmp_path):
    model = build(name, 3 if TAKEN[name].window else None)
    model.save_pretrained(tmp_path / "before")
    patched(model).save_pretrained(tmp_path / "after")
    for file in ("config.json", "generation_config.json"):
        after = (tmp_path / "after" / file).read_text()
        assert OURS not in after
        assert after == (tmp_path / "before" / file).read_text()
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert implementation(loaded) != OURS
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    assert OURS.encode() not in state.getvalue()


DROPOUT = [name for name in SOME if name != "gemma3"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in DROPOUT for kind in BATCHES if kind != "packed" or TAKEN[name].positions],
)
def test_dropout_draws_the_masks_that_the_model_draws(name, kind, monkeypatch):
    """Ours has no dropout, on devices with kernels neither."""
    monkeypatch.setattr(interface, "use_triton", lambda query: True)
    window = 3 if TAKEN[name].window else None
    theirs = build(name, window, attention_dropout=0.5).train()
    ours = patched(copy.deepcopy(theirs))
    batch = BATCHES[kind]()
    expected = loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)
    without, _ = pair(name, window)
    assert total_error(expected, loss_and_gradients(without, batch)) > 0.1


@some
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["without reentry", "with reentry"])
@pytest.mark.parametrize("kind", ["left-padded", "packed"])
def test_checkpointed_layers(name, kind, use_reentrant):
    window = 3 if TAKEN[name].window else None
    _, ours = pair(name, window)
    batch = BATCHES[kind]()
    expected = loss_and_gradients(ours, batch)
    model = patched(build(name, window).train())
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with masks_received(model) as received:
        got = loss_and_gradients(model, batch)
    assert len(received) == 2 * model.config.get_text_config().num_hidden_layers, "each layer runs twice"
    assert all(isinstance(mask, AttentionPlan) for mask in received)
    assert_same(got, expected, floor=NOISE)


def test_a_four_dimensional_mask_is_the_users():
    theirs, ours = pair("llama", None)
    batch = full()
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[..., 5:, :3] = False
    for form in (mask, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)):
        # eager adds masks, so that only the second form is right for it
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        expected = loss_and_gradients(theirs, {**batch, "attention_mask": additive})
        assert_same(loss_and_gradients(ours, {**batch, "attention_mask": form}), expected, floor=NOISE)


@some
def test_positions_behind_a_mask_of_ones(name):
    """transformers looks for packed rows only where no mask is given."""
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    batch = packed()
    batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    expected = loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)


@some
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_a_padded_batch(name, side):
    """Counted without padding, as for generation."""
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    batch = padded(side)
    positions = (batch["attention_mask"].cumsum(-1) - 1).masked_fill(batch["attention_mask"] == 0, 1)
    batch = {**batch, "position_ids": positions}
    expected = loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)


@some
def test_lengths_of_documents_as_trl_passes_them(name):
    """`padding_free`: one row, with the documents' offsets next to the positions."""
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    batch = packed(((5, 3, 4),))
    offsets = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5, "max_length_k": 5}
    expected = documents_alone(theirs, batch)
    got = loss_and_gradients(ours, {**batch, **lengths})
    assert_same(got, expected, floor=NOISE)


@some
def test_positions_that_are_written_over(name):
    """A caller may keep one tensor and write each batch into it."""
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    kept = torch.zeros(2, LENGTH, dtype=torch.long)
    for lengths in (((5, 3, 4), (2, 9, 1)), ((4, 4, 4), (12,)), ((12,), (12,))):
        batch = packed(lengths)
        expected = documents_alone(theirs, batch)
        kept.copy_(batch["position_ids"])
        got = loss_and_gradients(ours, {**batch, "position_ids": kept})
        assert_same(got, expected, floor=NOISE)


@some
def test_positions_shared_by_all_rows(name):
    """The same tensor for batches of different sizes."""
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    shared = packed(((5, 3, 4),))["position_ids"]
    for rows in (1, 3):
        batch = packed(((5, 3, 4),) * rows)
        expected = documents_alone(theirs, batch)
        got = loss_and_gradients(ours, {**batch, "position_ids": shared})
        assert_same(got, expected, floor=NOISE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["full", "left-padded"])
def test_without_a_causal_order(name, kind):
    """`is_causal` false in the configuration makes a decoder an encoder."""
    window = 3 if TAKEN[name].window else None
    model = build(name, window, is_causal=False).train()
    theirs, batch = eager(model), BATCHES[kind]()
    expected = loss_and_gradients(theirs, batch)
    apply_liger_kernel(model, ONLY)
    assert_same(loss_and_gradients(model, batch), expected, floor=NOISE)
    assert total_error(expected, loss_and_gradients(pair(name, window)[1], batch)) > 0.1


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("kind", ["left-padded", "packed"])
def test_compiled(name, kind):
    torch._dynamo.reset()
    theirs, _ = pair(name, 3)
    model = torch.compile(patched(build(name, 3).train()), backend="eager")
    batch = BATCHES[kind]()
    expected = loss_and_gradients(theirs, batch)
    got = {key.removeprefix("_orig_mod."): value for key, value in loss_and_gradients(model, batch).items()}
    assert_same(got, expected, floor=NOISE)


WITHOUT_CHOICE = {"gpt_oss": {"num_experts_per_tok": 4}}
"""Every token goes to all experts; otherwise rounding would send some to others."""


@some
@pytest.mark.parametrize("kind", ["left-padded", "packed"])
def test_autocast_as_trainers_do(name, kind):
    window, without_choice = 3 if TAKEN[name].window else None, WITHOUT_CHOICE.get(name, {})
    model = build(name, window, **without_choice).train()
    batch = BATCHES[kind]()
    truth = loss_and_gradients(patched(copy.deepcopy(model)), batch)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = loss_and_gradients(model, batch)
        got = loss_and_gradients(patched(model), batch)
    allowed = total_error(truth, theirs) if kind != "packed" or TAKEN[name].positions else 1.0
    assert total_error(truth, got) <= 1.1 * allowed


def test_a_prefix_of_keys():
    """PEFT's prefix tuning: a cache before the first token, and a mask longer than the row."""
    models = [build("llama").train(), patched(build("llama").train())]
    batch = padded("right")
    results = []
    for model in models:
        torch.manual_seed(0)
        peft_model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        results.append(loss_and_gradients(peft_model, batch))
    assert_same(results[1], results[0], floor=NOISE)


@some
def test_a_mask_with_holes(name):
    theirs, ours = pair(name, 3 if TAKEN[name].window else None)
    batch = full()
    batch["attention_mask"][:, 4:6] = 0
    batch["labels"][:, 4:7] = -100
    expected = loss_and_gradients(theirs, batch)
    assert_same(loss_and_gradients(ours, batch), expected, floor=NOISE)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["full", "packed"])
def test_bf16_is_as_near_to_the_truth_as_the_model_itself(name, kind):
    window = 3 if TAKEN[name].window else None
    model = build(name, window, **WITHOUT_CHOICE.get(name, {})).train().bfloat16()
    batch = BATCHES[kind]()
    truth = loss_and_gradients(patched(copy.deepcopy(model).float()), batch)
    got = loss_and_gradients(patched(model), batch)
    revert_liger_kernel(model)
    expected = loss_and_gradients(model, batch)
    if kind != "packed" or TAKEN[name].positions:
        assert total_error(truth, got) <= 1.25 * total_error(truth, expected)
    assert total_error(truth, got) < 1
    assert {key: value.dtype for key, value in got.items()} == {key: value.dtype for key, value in expected.items()}


@some
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_padding_gives_numbers_in_low_precision(name, side, dtype):
    model = patched(build(name, 3 if TAKEN[name].window else None).train().to(dtype))
    got = loss_and_gradients(model, padded(side))
    assert all(value.isfinite().all() for value in got.values())
