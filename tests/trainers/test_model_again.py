"""A model, or arguments, that another trainer has had before: what it left there does no harm."""

import pytest
import trl
from transformers import Trainer, TrainingArguments

import liger_trainer
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.patching.binding import bound_modules
from liger_trainer.trainers import token_statistics
from tests.trainers.parity import BASE, KINDS, build, lora
from tests.trainers.tiny import llama, token_rows, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def never_built(monkeypatch):
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
    monkeypatch.setattr(token_statistics, "log_probs", lambda *args, **kwargs: pytest.fail("the model built logits"))


def plainly_trained(folder, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), **{**BASE, "bf16": True})
    trainer = liger_trainer.LigerTrainer(llama(), args, train_dataset=token_rows())
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
    case = {"peft_config": lora()} if peft else {}
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
