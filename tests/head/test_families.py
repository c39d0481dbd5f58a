"""Every model family trains the same with the deferred head, and never builds its logits."""

from __future__ import annotations

import copy
import inspect
import statistics

import pytest
import torch
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother

from liger_trainer.head import DeferredLogits, fused_loss
from liger_trainer.patching.binding import unbind_forward
from liger_trainer.patching.head import patch_head
from tests.steps import step_with
from tests.tiny_models import TINY_MODELS, VOCAB, tiny_batch

SOME = ("llama", "gemma2", "granite", "qwen3_moe")  # plain; soft-cap and tied; scaled; auxiliary loss


def patched(name: str, fused: bool = True, **overrides):
    model = TINY_MODELS[name](**overrides).train()
    row = patch_head(model, fused=fused, logits_memory=2**20)
    assert row.applied, row
    assert row.probe_error < 1e-5
    return model


def step(loss, model):
    """`loss`, and the gradients of `model` after its backward, by name."""
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward(model, inputs, **extra):
    model.zero_grad(set_to_none=True)
    return step(model(**inputs, **extra).loss, model)


def assert_same(ours, native, tolerance=1e-5):
    torch.testing.assert_close(ours[0], native[0], rtol=tolerance, atol=tolerance)
    assert ours[1].keys() == native[1].keys()
    for name, grad in native[1].items():
        difference = (ours[1][name] - grad).abs().max() / grad.abs().max().clamp_min(1e-6)
        assert difference <= tolerance, f"{name}: {difference}"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_fp32_training_step(name, fused, never_built):
    native = TINY_MODELS[name]().train()
    inputs = tiny_batch(name, native)
    assert_same(backward(patched(name, fused), inputs), backward(native, inputs))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_bf16_training_step(name, never_built):
    """As far from the same weights in fp32 as the native bf16 model, in the middle of several batches.

    The quotient of two rounding errors scatters, and jumps where one of them sends a token to another expert.
    """
    native = TINY_MODELS[name]().train().bfloat16()
    ours = patched(name).bfloat16()
    exact = copy.deepcopy(native).float()
    quotients = []
    for seed in range(5):
        inputs = tiny_batch(name, native, seed=seed)
        true, theirs, mine = (backward(model, inputs) for model in (exact, native, ours))
        assert mine[0].dtype == theirs[0].dtype
        torch.testing.assert_close(mine[0].float(), true[0], rtol=2**-6, atol=0)
        assert mine[1].keys() == theirs[1].keys()
        size = sum(value.square().sum() for value in true[1].values()).sqrt()
        our_error, their_error = (
            sum((grads[1][key].float() - value).square().sum() for key, value in true[1].items()).sqrt()
            for grads in (mine, theirs)
        )
        quotients.append((our_error / (their_error + 2**-9 * size)).item())
    assert statistics.median(quotients) <= 1.3


def keep_positions(inputs, positions):
    return {**inputs, "labels": inputs["labels"][:, positions]}


VARIANTS = {
    "num_items int": lambda x: {**x, "num_items_in_batch": 40},
    "num_items tensor": lambda x: {**x, "num_items_in_batch": torch.tensor(40)},
    "shift_labels": lambda x: {**x, "shift_labels": F.pad(x["labels"], (0, 1), value=-100)[:, 1:].contiguous()},
    "ignore_index": lambda x: {**x, "labels": x["labels"].masked_fill(x["labels"] == -100, 5), "ignore_index": 5},
    "logits_to_keep": lambda x: {**keep_positions(x, slice(-6, None)), "logits_to_keep": 6},
    "logits_to_keep positions": lambda x: {
        **keep_positions(x, [1, 4, 7]),
        "logits_to_keep": torch.tensor([1, 4, 7]),
    },
    "all but one ignored": lambda x: {**x, "labels": x["labels"].masked_fill(torch.arange(12) != 5, -100)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SOME)
def test_loss_arguments(name, variant, never_built):
    native = TINY_MODELS[name]().train()
    inputs = VARIANTS[variant](tiny_batch(name, native))
    assert_same(backward(patched(name), inputs), backward(native, inputs))


def test_all_labels_ignored_is_a_finite_zero_loss(never_built):
    model = patched("llama")
    inputs = tiny_batch("llama", model)
    inputs["labels"].fill_(-100)
    loss, grads = backward(model, inputs)
    assert loss == 0
    assert len(grads) == len(list(model.parameters()))
    assert all((grad == 0).all() for grad in grads.values())


def test_num_items_is_the_expected_gradient(monkeypatch):
    model = patched("llama")
    inputs = tiny_batch("llama", model)
    seen = []
    real = fused_loss.linear_cross_entropy
    monkeypatch.setattr(
        fused_loss,
        "linear_cross_entropy",
        lambda *args, **kwargs: (seen.append(kwargs["expected_grad"]), real(*args, **kwargs))[1],
    )
    model(**inputs)
    model(**inputs, num_items_in_batch=40)
    model(**inputs, num_items_in_batch=torch.tensor(40))
    with step_with(expected_gradient=0.25):
        model(**inputs, num_items_in_batch=40)
        model(**inputs)
    assert seen[0] is None
    assert seen[1] == 1 / 40
    assert seen[2].dtype == torch.float32
    assert seen[2] == torch.tensor(1.0) / 40
    assert seen[3:] == [0.25, 0.25]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_gradient_checkpointing(name, reentrant, never_built):
    native, ours = TINY_MODELS[name]().train(), patched(name)
    inputs = tiny_batch(name, native)
    for model in (native, ours):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same(backward(ours, inputs), backward(native, inputs))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_accumulation_is_one_big_batch(name, never_built):
    model = patched(name)
    inputs = tiny_batch(name, model, batch=4)
    items = (inputs["labels"][:, 1:] != -100).sum()
    whole = backward(model, inputs, num_items_in_batch=items)
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for part in range(2):
        loss = model(**{k: v.chunk(2)[part] for k, v in inputs.items()}, num_items_in_batch=items).loss
        loss.backward()
        total += loss.detach()
    assert_same((total, {n: p.grad for n, p in model.named_parameters()}), whole)


def test_upstream_gradient_and_second_backward(never_built):
    native, ours = TINY_MODELS["llama"]().train(), patched("llama")
    inputs = tiny_batch("llama", native)
    for model in (native, ours):
        loss = model(**inputs, num_items_in_batch=40).loss * 3
        loss.backward(retain_graph=True)
        loss.backward()
    for theirs, mine in zip(native.parameters(), ours.parameters()):
        assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_autocast(name, never_built):
    native, ours = TINY_MODELS[name]().train(), patched(name)
    inputs = tiny_batch(name, native)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(**inputs).loss for model in (ours, native)]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses, rtol=2**-8, atol=0)
    for loss in losses:
        loss.backward()
    mine, theirs = ours.lm_head.weight.grad, native.lm_head.weight.grad
    assert (mine - theirs).norm() <= 2**-5 * theirs.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_label_smoother_and_other_losses_on_the_logits(name):
    native, ours = TINY_MODELS[name]().train(), patched(name)
    inputs = tiny_batch(name, native)
    labels = inputs.pop("labels")
    losses = [LabelSmoother(0.1)(model(**inputs), labels, shift_labels=True) for model in (ours, native)]
    assert_same(step(losses[0], ours), step(losses[1], native))


def test_loss_outside_the_model_is_fused(never_built):
    native, ours = TINY_MODELS["llama"]().train(), patched("llama")
    inputs = tiny_batch("llama", native)
    labels = inputs.pop("labels")[:, 1:].reshape(-1)

    def loss(model):
        return F.cross_entropy(model(**inputs).logits[..., :-1, :].contiguous().view(-1, VOCAB), labels)

    assert_same(step(loss(ours), ours), step(loss(native), native))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_evaluation(name, monkeypatch):
    native, ours = TINY_MODELS[name]().eval(), patched(name).eval()
    inputs = tiny_batch(name, native)
    with torch.no_grad():
        theirs, mine = native(**inputs), ours(**inputs)
        assert type(mine.logits) is torch.Tensor, "metrics get logits"
        assert torch.equal(mine.logits, theirs.logits)
        assert torch.equal(mine.loss, theirs.loss)
        monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
        loss_only = ours(**inputs, skip_logits=True)
        assert type(loss_only.logits) is DeferredLogits
        torch.testing.assert_close(loss_only.loss, theirs.loss, rtol=1e-5, atol=1e-6)
        inputs.pop("labels")  # as the Trainer does for a loss of its own
        asked_off = ours(**inputs, skip_logits=True).logits
        assert type(asked_off) is DeferredLogits, "none are built before they are read"
        monkeypatch.undo()
        assert torch.equal(asked_off.float(), theirs.logits.float())


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name not in ("gemma3", "qwen2_vl", "mllama")])
def test_generate(name):
    native, ours = TINY_MODELS[name]().eval(), patched(name)
    prompt = tiny_batch(name, native)["input_ids"][:1]
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = native.generate(prompt, **options)
    assert torch.equal(ours.generate(prompt, **options), expected), "in train mode, as trainers sample"
    assert torch.equal(ours.eval().generate(prompt, **options), expected)


def test_signature_is_the_models_own():
    native, ours = TINY_MODELS["llama"](), patched("llama")
    assert inspect.signature(ours.forward) == inspect.signature(native.forward)
    with pytest.raises(ValueError, match="not_an_argument"):
        ours.generate(torch.tensor([[3, 4]]), max_new_tokens=1, not_an_argument=1)


def test_positional_labels_and_tuples(never_built):
    native, ours = TINY_MODELS["llama"]().train(), patched("llama")
    x = tiny_batch("llama", native)
    positional = (x["input_ids"], x["attention_mask"], None, None, None, x["labels"])
    torch.testing.assert_close(ours(*positional).loss, native(*positional).loss)
    torch.testing.assert_close(ours(**x, return_dict=False)[0], native(**x).loss)


def test_head_called_directly_gives_logits():
    model = patched("llama")
    assert type(model.lm_head(torch.randn(1, 2, 32))) is torch.Tensor


def test_copies_work_alone(never_built):
    ours = patched("llama")
    twin = copy.deepcopy(ours)
    inputs = tiny_batch("llama", ours)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2.0)
    native = TINY_MODELS["llama"]().train()
    assert_same(backward(ours, inputs), backward(native, inputs))
    with torch.no_grad():
        native.lm_head.weight.mul_(2.0)
    assert_same(backward(twin, inputs), backward(native, inputs))
    assert twin.lm_head.forward.__self__ is twin.lm_head


def test_patching_again_and_undoing():
    model = patched("llama")
    assert patch_head(model, fused=False, logits_memory=2**20).kernel == "cross_entropy"
    assert patch_head(model, fused=True, logits_memory=2**21).kernel.startswith("linear_cross_entropy")
    inputs = tiny_batch("llama", model)
    assert type(model(**inputs).logits) is DeferredLogits
    assert unbind_forward(model)
    assert unbind_forward(model.lm_head)
    assert "forward" not in model.__dict__
    assert type(model(**inputs).logits) is torch.Tensor


def test_interleaved_models_do_not_see_each_other(never_built):
    """A reference model in evaluation, called inside the policy's training step."""
    policy, reference = patched("llama"), patched("gemma2").eval()
    inputs = tiny_batch("llama", policy)
    policy.model.register_forward_hook(lambda *_: seen.append(reference(inputs["input_ids"]).logits))
    seen: list[torch.Tensor] = []
    assert type(policy(**inputs).logits) is DeferredLogits
    assert type(seen[0]) is torch.Tensor


def test_backward_hooks_on_the_head_see_the_gradient_of_the_logits():
    native, ours = TINY_MODELS["llama"]().train(), patched("llama")
    inputs = tiny_batch("llama", native)
    results, seen = [], []
    for model in (ours, native):
        model.lm_head.register_full_backward_hook(lambda _, grad_in, grad_out: seen.append((grad_in[0], grad_out[0])))
        results.append(backward(model, inputs))
    assert_same(*results)
    torch.testing.assert_close(*seen)


def test_several_forwards_before_one_backward_with_an_evaluation_between(never_built):
    native, ours = TINY_MODELS["llama"]().train(), patched("llama")
    inputs = tiny_batch("llama", native)

    def loss(model):
        first = model(**inputs).loss
        with torch.no_grad():
            assert type(model.eval()(**inputs).logits) is torch.Tensor
            model.train()(**inputs)
        second = model(**{name: value.flip(0) for name, value in inputs.items()}, num_items_in_batch=7).loss
        return first + second.square() / 2

    assert_same(step(loss(ours), ours), step(loss(native), native))


def test_reset_when_a_forward_fails():
    model = patched("llama")
    with pytest.raises(ValueError, match="input_ids"):
        model(input_ids=None, inputs_embeds=None, labels=torch.zeros(1, 2, dtype=torch.long))
    assert type(model.lm_head(torch.randn(2, 32))) is torch.Tensor
