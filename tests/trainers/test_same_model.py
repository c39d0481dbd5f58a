"""A model, or arguments, that another trainer has had before: the last settings hold, and nothing else is left."""

import logging

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTTrainer

import liger_trainer
from liger_trainer import revert_liger_kernel
from liger_trainer.patching.binding import bound_modules
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.builders import causal, sft
from tests.trainers.parity import BASE, KINDS, build, lora
from tests.trainers.tiny import llama, token_rows, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def applied(trainer):
    return {row.component for row in trainer.kernel_report.applied}


def test_the_last_configuration_holds(tmp_path):
    model = llama()
    causal(tmp_path, model).train()
    second = causal(tmp_path, model, liger_kernel_config={"rope": False})
    second.train()
    assert applied(second) == {"attention", "rms_norm", "swiglu", "linear_cross_entropy"}
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_reverted_model_is_patched_again(tmp_path):
    model = llama()
    causal(tmp_path, model)
    revert_liger_kernel(model)
    assert "rope" in applied(causal(tmp_path, model))
    assert "forward" in model.model.layers[0].self_attn.__dict__


def test_kernels_from_before_are_named_where_the_flag_is_off(tmp_path, caplog):
    model = llama()
    causal(tmp_path, model)
    with caplog.at_level(logging.WARNING, logger="liger_trainer"):
        causal(tmp_path, model, use_liger_kernel=False)
    assert "revert_liger_kernel(model)" in caplog.text
    caplog.clear()
    causal(tmp_path, llama(), use_liger_kernel=False)
    assert not caplog.text


def test_stock_trainer_beside_a_liger_trainer(tmp_path):
    ours = causal(tmp_path, llama())
    stock = causal(tmp_path, trainer_class=Trainer)
    ours.train()
    stock.train()
    assert not any("forward" in module.__dict__ for module in stock.model.modules())


def test_stock_trainer_inside_a_liger_trainers_training(tmp_path):
    """Only the model of the trainer that is running is left as it is."""
    stock = causal(tmp_path, trainer_class=Trainer, use_liger_kernel=True)

    class Outer(LigerTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 0:
                stock.train()
            return super().training_step(*args, **kwargs)

    causal(tmp_path, trainer_class=Outer).train()
    assert "forward" in stock.model.model.norm.__dict__


@pytest.mark.parametrize("bf16", [False, True])
def test_sft_trainers(bf16, tmp_path):
    """The second one finds the first one's forward on the model; under bf16 accelerate has wrapped it, too."""
    model, plain = llama(), llama()
    for _ in range(2):
        ours = sft(tmp_path, model, bf16=bf16)
        assert applied(ours) == {"attention", "rope", "rms_norm", "swiglu", "linear_cross_entropy"}
        stock = sft(tmp_path, plain, SFTTrainer, bf16=bf16)
        tolerance = 2e-2 if bf16 else 1e-5
        assert ours.train().training_loss == pytest.approx(stock.train().training_loss, rel=tolerance)
    revert_liger_kernel(model)
    assert ours.evaluate(ours.train_dataset)["eval_loss"] == pytest.approx(
        stock.evaluate(stock.train_dataset)["eval_loss"], rel=tolerance
    )
    assert torch.isfinite(model.lm_head.weight).all()


def plainly_trained(folder, tmp_path):
    trainer = causal(tmp_path, bf16=True)
    trainer.train()
    return trainer.model


def tuned(folder, tmp_path):
    trainer = build("SFT", True, tmp_path, folder, bf16=True)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("first", [plainly_trained, tuned])
@pytest.mark.parametrize("peft", [False, True])
def test_no_logits_after_mixed_precision(first, peft, tmp_path, folders, never_built):
    """Accelerate has wrapped the forward: evaluation, and a reference without gradients, still take the fused head."""
    model = first(folders["llama"], tmp_path / "first")
    model.config._name_or_path = folders["llama"]
    case = {"peft_config": lora()} if peft else {"ref_model": AutoModelForCausalLM.from_pretrained(folders["llama"])}
    trainer = build("DPO", True, tmp_path, model, bf16=True, eval_strategy="steps", eval_steps=1, **case)
    trainer.train()
    assert trainer.state.global_step == 2


def test_arguments_of_a_stock_trainer_stay_its_own(tmp_path, folders):
    args = trl.DPOConfig(output_dir=str(tmp_path), **BASE)
    given = {"args": args, "train_dataset": KINDS["DPO"][0](), "processing_class": tokenizer()}
    ours = liger_trainer.LigerDPOTrainer(folders["llama"], **given)
    stock = trl.DPOTrainer(folders["llama"], **given)
    stock.train()
    assert any(bound_modules(ours.model))
    assert not any(bound_modules(stock.model))

    args = TrainingArguments(output_dir=str(tmp_path), **BASE)
    assert liger_trainer.LigerTrainer(llama(), args, train_dataset=token_rows()).kernel_report.applied
    stock = Trainer(llama(), args, train_dataset=token_rows())
    stock.train()
    assert not any(bound_modules(stock.model))


def test_arguments_after_an_error(tmp_path, folders):
    args = trl.DPOConfig(output_dir=str(tmp_path), **BASE)
    with pytest.raises(ValueError, match="train_dataset"):
        liger_trainer.LigerDPOTrainer(folders["llama"], args=args, train_dataset=None)
    assert args.use_liger_kernel is False
