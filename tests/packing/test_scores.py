"""Reward models: which classes are proved to score packed rows as padded ones, and that they do, token by token."""

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3ForSequenceClassification,
    GPTBigCodeForSequenceClassification,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from liger_trainer.attention.interface import NAME
from liger_trainer.packing.packing import Packing
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.choose_packing import install_packed_scores, prove_packed_scores

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
COMMON = {name: value for name, value in TEXT.items() if name not in ("layer_types", "sliding_window", "head_dim")}
CONFIGS = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "image_token_index": 63, "mm_tokens_per_image": 4},
    "gemma3_text": TEXT,
    "gpt_bigcode": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "pad_token_id": 0,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "gpt_neox": {name: value for name, value in COMMON.items() if name != "num_key_value_heads"},
    "llama": COMMON,
    "mixtral": {**COMMON, "num_local_experts": 4},
}  # fmt: skip


def model_of(name, **fields):
    config = AutoConfig.for_model(name, **CONFIGS[name], num_labels=3, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config).double().eval()
    apply_liger_kernel(model)
    assert model.config.get_text_config()._attn_implementation == NAME
    return model


class FirstToken(LlamaForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        first = (input_ids != 0).int().argmax(-1)
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        outputs.logits = self.score(hidden)[torch.arange(len(input_ids)), first]
        return outputs


class LastOfMask(LlamaForSequenceClassification):
    """Takes a padding token that the mask does not hide, such as an end of a sequence with the same id."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        last = (attention_mask * torch.arange(input_ids.shape[1])).argmax(-1)
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        outputs.logits = self.score(hidden)[torch.arange(len(input_ids)), last]
        return outputs


class Squashed(LlamaForSequenceClassification):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.tanh()
        return outputs


class OtherName(LlamaForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.reward = self.score
        del self.score


REFUSED = {
    FirstToken: "packed rows give other values (",
    LastOfMask: "packed rows give other values (",
    Squashed: "packed rows give other values (",
    OtherName: "it has no `score` of the hidden states of a model inside it",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_proved_by_what_they_compute(name):
    agreement = prove_packed_scores(model_of(name))
    assert agreement.equal, agreement.reason


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_other_scores_are_refused(kind):
    model = kind(LlamaConfig(**COMMON, num_labels=1))
    apply_liger_kernel(model)
    assert prove_packed_scores(model).reason.startswith(REFUSED[kind])


def test_a_forward_that_somebody_replaced_is_refused():
    model = model_of("llama")
    model.forward = lambda *args, **kwargs: None
    assert prove_packed_scores(model).reason == "its forward is not that of its class"


def uneven(vocab):
    """Rows of 1 to 20 tokens with padding on either side, some with a common beginning, one that ends in a padding
    token of its own."""
    ids = torch.randint(1, vocab, (7, 20))
    ids[1, :12] = ids[0, :12]
    begins, ends = torch.tensor([0, 0, 5, 19, 0, 3, 0]), torch.tensor([20, 15, 20, 20, 1, 9, 18])
    mask = (torch.arange(20) >= begins[:, None]) & (torch.arange(20) < ends[:, None])
    ids = ids.masked_fill(~mask, 0)
    ids[6, 16:18] = 0
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.mark.parametrize("options", [{"share": False}, {"share": True}, {"share": False, "most": 24}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_gradients_are_those_of_padded_rows(name, options):
    model = model_of(name)
    batch = uneven(60)

    def results():
        model.zero_grad()
        logits = model(**batch, use_cache=False).logits
        logits.pow(2).sum().backward()
        return logits.detach(), {each: p.grad.clone() for each, p in model.named_parameters() if p.grad is not None}

    expected, gradients = results()
    columns = torch.arange(20)[None]
    alone = [
        model(input_ids=ids[None, mask.bool()], position_ids=columns[:, mask.bool()]).logits[0]
        for ids, mask in zip(*batch.values(), strict=True)
    ]
    torch.testing.assert_close(torch.stack(alone), expected, rtol=1e-12, atol=1e-12)
    packing = Packing(**options)
    install_packed_scores(model, packing)
    found, ours = results()
    assert packing.trained == int(batch["attention_mask"].sum())
    assert (packing.executed < packing.trained) == options["share"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert ours.keys() == gradients.keys()
    for each, gradient in gradients.items():
        # Gradients of tokens that rows share are summed in fp32.
        assert (ours[each] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), each


@pytest.mark.parametrize(
    "kind", [Gemma3ForSequenceClassification, GPTBigCodeForSequenceClassification, GPTNeoXForSequenceClassification]
)
def test_these_classes_have_forwards_of_their_own(kind):
    assert "forward" in vars(kind)
