"""Several trainers of one model, one after the other: the last one's settings hold."""

import logging

import pytest
import torch
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

from liger_trainer import revert_liger_kernel
from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.tiny import COMMON, llama, text_dataset, token_rows, tokenizer


def causal(model, tmp_path, **kwargs):
    args = LigerTrainingArguments(output_dir=str(tmp_path), **COMMON, **kwargs)
    return LigerTrainer(model, args, train_dataset=token_rows(), eval_dataset=token_rows())


def sft(model, tmp_path, trainer_class=LigerSFTTrainer, **kwargs):
    args = LigerSFTConfig(output_dir=str(tmp_path), **{**COMMON, "bf16": False, **kwargs})
    return trainer_class(model, args, train_dataset=text_dataset(), processing_class=tokenizer())


def applied(trainer):
    return {row.component for row in trainer.kernel_report.applied}


def test_the_last_configuration_holds(tmp_path):
    model = llama()
    causal(model, tmp_path).train()
    second = causal(model, tmp_path, liger_kernel_config={"rope": False})
    second.train()
    assert applied(second) == {"rms_norm", "swiglu", "linear_cross_entropy"}
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_reverted_model_is_patched_again(tmp_path):
    model = llama()
    causal(model, tmp_path)
    revert_liger_kernel(model)
    assert "rope" in applied(causal(model, tmp_path))
    assert "forward" in model.model.layers[0].self_attn.__dict__


def test_kernels_from_before_are_named_where_the_flag_is_off(tmp_path, caplog):
    model = llama()
    causal(model, tmp_path)
    with caplog.at_level(logging.WARNING, logger="liger_trainer"):
        causal(model, tmp_path, use_liger_kernel=False)
    assert "revert_liger_kernel(model)" in caplog.text
    caplog.clear()
    causal(llama(), tmp_path, use_liger_kernel=False)
    assert not caplog.text


def test_stock_trainer_beside_a_liger_trainer(tmp_path):
    ours = causal(llama(), tmp_path)
    args = TrainingArguments(output_dir=str(tmp_path), **COMMON)
    stock = Trainer(llama(), args, train_dataset=token_rows())
    ours.train()
    stock.train()
    assert not any("forward" in module.__dict__ for module in stock.model.modules())


def test_stock_trainer_inside_a_liger_trainers_training(tmp_path):
    """Only the model of the trainer that is running is left as it is."""
    args = TrainingArguments(output_dir=str(tmp_path), **COMMON, use_liger_kernel=True)
    stock = Trainer(llama(), args, train_dataset=token_rows())

    class Outer(LigerTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 0:
                stock.train()
            return super().training_step(*args, **kwargs)

    Outer(llama(), LigerTrainingArguments(output_dir=str(tmp_path), **COMMON), train_dataset=token_rows()).train()
    assert "forward" in stock.model.model.norm.__dict__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True])
def test_sft_trainers(bf16, tmp_path):
    """The second one finds the first one's forward on the model; under bf16 accelerate has wrapped it, too."""
    model, plain = llama(), llama()
    for _ in range(2):
        ours = sft(model, tmp_path, bf16=bf16)
        assert applied(ours) == {"rope", "rms_norm", "swiglu", "linear_cross_entropy"}
        stock = sft(plain, tmp_path, SFTTrainer, use_liger_kernel=False, bf16=bf16)
        tolerance = 2e-2 if bf16 else 1e-5
        assert ours.train().training_loss == pytest.approx(stock.train().training_loss, rel=tolerance)
    revert_liger_kernel(model)
    assert ours.evaluate(ours.train_dataset)["eval_loss"] == pytest.approx(
        stock.evaluate(stock.train_dataset)["eval_loss"], rel=tolerance
    )
    assert torch.isfinite(model.lm_head.weight).all()
