"""An adapter on a head that is tied to the embedding: what PEFT's merge makes of it, and the remedy that we name."""

import logging

import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from transformers import AutoModelForCausalLM

from liger_trainer import apply_liger_kernel
from tests.trainers.builders import causal, sft
from tests.trainers.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore")

WARNING = "is tied to the embedding"
TIED = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tied": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "rows of the head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4]}},
    "other rows": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"lm_head": [3, 4], "embed_tokens": [5]},
    },
}
LEFT = {
    "layers": ({"target_modules": ["q_proj"]}, True),
    "untied": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "saved": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    "rows": ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}, True),
    "rows of both": (
        {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4], "embed_tokens": [3, 4]}}, True,
    ),
    "untied rows": ({"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4]}}, False),
    "rows alone": (TrainableTokensConfig(token_indices=[3, 4]), True),
}  # fmt: skip


def adapted(options, tie=True):
    config = LoraConfig(r=4, init_lora_weights=False, **options) if isinstance(options, dict) else options
    model = get_peft_model(llama(tie_word_embeddings=tie), config)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("build", [causal, sft])
@pytest.mark.parametrize("case", TIED)
def test_one_warning_whose_remedy_is_right(case, build, tmp_path, caplog):
    trainer = build(tmp_path, adapted(TIED[case]))
    trainer.train()
    warned = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(warned) == 1
    assert caplog.records[0].levelno == logging.WARNING
    model = trainer.model.eval()
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        exec(warned[0].split("`")[-2], {"model": model, "torch": torch})  # the code in the message
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        for found in (merged, loaded):
            torch.testing.assert_close(found(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", TIED)
def test_without_the_remedy_the_merge_is_another_model(case):
    model = adapted(TIED[case]).eval()
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert (model.merge_and_unload()(input_ids=ids).logits - expected).abs().max() > 0.1


@pytest.mark.parametrize("case", LEFT)
def test_no_warning_for_other_models(case, tmp_path, caplog):
    options, tie = LEFT[case]
    trainer = causal(tmp_path, adapted(options, tie))
    assert WARNING not in caplog.text
    assert not any("tied" in row.reason for row in trainer.kernel_report)


@pytest.mark.parametrize("case", LEFT)
def test_without_a_warning_the_merge_is_the_same_model(case):
    model = adapted(*LEFT[case]).eval()
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", TIED)
def test_the_report_says_it_too(case):
    report = apply_liger_kernel(adapted(TIED[case]))
    row = next(row for row in report if row.component == "linear_cross_entropy")
    assert row.applied
    assert row.reason == "tied to the embedding, and adapted: untie it before a merge"
