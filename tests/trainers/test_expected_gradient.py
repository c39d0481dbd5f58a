"""The fused loss is told exactly the gradient that arrives, so that no pass rescales its gradients."""

import pytest

from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.kernels.head import linear_cross_entropy
from liger_trainer.kernels.head import linear_log_probs_expected as _linear_expected_gradient
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.tiny import COMMON, llama, text_dataset, token_rows, tokenizer


@pytest.fixture
def told_and_got(monkeypatch):
    pairs = []
    for module in (_linear_expected_gradient, linear_cross_entropy):  # log-probabilities, and a loss

        def spy(gradients, upstream, expected, function, original=module.rescaled_gradients):
            pairs.append((expected.clone(), upstream.clone()))
            return original(gradients, upstream, expected, function)

        monkeypatch.setattr(module, "rescaled_gradients", spy)
    return pairs


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(accumulation, smoothing, told_and_got, tmp_path):
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        **{**COMMON, "gradient_accumulation_steps": accumulation, "label_smoothing_factor": smoothing},
    )
    trainer = LigerTrainer(llama(), args, train_dataset=token_rows())
    told_and_got.clear()  # of the probes
    trainer.train()
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
    trainer = LigerSFTTrainer(llama(), args, train_dataset=text_dataset(), processing_class=tokenizer())
    told_and_got.clear()  # of the probes
    trainer.train()
    assert len(told_and_got) == 3 * accumulation
    assert all(told.item() == got.item() for told, got in told_and_got)
