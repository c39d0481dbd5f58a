"""The fused loss is told exactly the gradient that arrives, so that no pass rescales its gradients."""

import pytest
import torch

from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.head import fused_loss
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.tiny import COMMON, llama, text_dataset, token_rows, tokenizer


@pytest.fixture
def told_and_got(monkeypatch):
    pairs = []
    original = fused_loss.linear_cross_entropy

    def spy(*args, expected_grad=None, **kwargs):
        result = original(*args, expected_grad=expected_grad, **kwargs)
        loss = getattr(result, "loss", result)
        if loss.requires_grad and expected_grad is not None:  # None is told by the probe at construction
            loss.register_hook(lambda grad: pairs.append((torch.as_tensor(expected_grad), grad.clone())))
        return result

    monkeypatch.setattr(fused_loss, "linear_cross_entropy", spy)
    return pairs


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(accumulation, smoothing, told_and_got, tmp_path):
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        **{**COMMON, "gradient_accumulation_steps": accumulation, "label_smoothing_factor": smoothing},
    )
    LigerTrainer(llama(), args, train_dataset=token_rows()).train()
    assert len(told_and_got) == 3 * accumulation
    assert all(told.item() == got.item() for told, got in told_and_got)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sft_trainer(accumulation, smoothing, told_and_got, tmp_path):
    args = LigerSFTConfig(
        output_dir=str(tmp_path),
        bf16=False,
        gradient_checkpointing=False,
        **{**COMMON, "gradient_accumulation_steps": accumulation, "label_smoothing_factor": smoothing},
    )
    LigerSFTTrainer(llama(), args, train_dataset=text_dataset(), processing_class=tokenizer()).train()
    assert len(told_and_got) == 3 * accumulation
    assert all(told.item() == got.item() for told, got in told_and_got)
