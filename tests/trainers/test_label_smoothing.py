"""The fused label smoother against the one of transformers, and the labels that it compares with the logits."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification
from transformers.trainer_pt_utils import LabelSmoother

from liger_trainer.callbacks.labelled_share import first_label
from liger_trainer.trainers.label_smoothing import FusedLabelSmoother, shifts_labels
from tests.tiny_models import TINY_MODELS, tiny_batch
from tests.trainers.builders import causal
from tests.trainers.tiny import SIZES, llama, mixtral, token_rows


@pytest.mark.parametrize("shift_labels", [False, True])
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(5.0)])
@pytest.mark.parametrize("epsilon", [0.1, 0.9])
def test_value_and_gradient(epsilon, num_items, shift_labels):
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 11, dtype=torch.float32)
    labels = torch.randint(0, 11, (2, 6))
    labels[0, :3] = -100
    results = []
    for smoother in (LabelSmoother(epsilon), FusedLabelSmoother(epsilon)):
        x = logits.clone().requires_grad_()
        loss = smoother({"logits": x}, labels, shift_labels=shift_labels, num_items_in_batch=num_items)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-7)


def test_without_labels_it_is_a_zero_that_backpropagates():
    x = torch.randn(1, 4, 5, requires_grad=True)
    loss = FusedLabelSmoother(0.1)((x,), torch.full((1, 4), -100), shift_labels=True)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()


class Renamed(LlamaForCausalLM):
    """A causal model whose name says nothing."""


class RenamedEncoder(BertForMaskedLM):
    """An encoder whose name says nothing."""


def _renamed():
    torch.manual_seed(0)
    return Renamed(LlamaConfig(**SIZES))


def _encoder(kind=BertForMaskedLM):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return kind(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_renamed(), LoraConfig(r=2, target_modules=["q_proj"]))


def _multimodal():
    return TINY_MODELS["qwen2_vl"]()  # its name is not in the Trainer's table of causal models either


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("build", "shifts"),
    [(_renamed, True), (_adapted, True), (_multimodal, True), (llama, True), (_encoder, False)],
)
def test_the_labels_are_those_of_the_models_own_loss(build, shifts, kernels, tmp_path):
    """Decided by the name of the class, a causal model would learn to copy its input."""
    model = build()
    trainer = causal(tmp_path, model, rows=token_rows(vocab=110), label_smoothing_factor=0.2, use_liger_kernel=kernels)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    labels = batch["labels"]
    loss = trainer.compute_loss(model, dict(batch)).detach()
    with torch.no_grad():
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    logits, labels = (logits[:, :-1], labels[:, 1:]) if shifts else (logits, labels)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_asking_leaves_the_model_as_it_was():
    model = mixtral().train()  # whose auxiliary loss is there without labels too
    model.config.output_router_logits = True
    model.model.layers[0].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    assert shifts_labels(model, tiny_batch("mixtral", model)) is True
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [BertForMaskedLM, RenamedEncoder])
def test_encoders_label_their_own_token(kind):
    model = _encoder(kind)
    assert shifts_labels(model, tiny_batch("bert", model)) is False
    assert first_label(model) == 0


def test_a_label_of_a_row_is_not_shifted():
    model = LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=3))
    assert shifts_labels(model, {"labels": torch.tensor([1, 2])}) is False


def test_a_model_without_a_loss_follows_the_trainer(caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        assert shifts_labels(nn.Linear(2, 2), {"labels": torch.zeros(1, 2, dtype=torch.long)}) is None
    assert "Linear shifts its labels is not known" in caplog.text
