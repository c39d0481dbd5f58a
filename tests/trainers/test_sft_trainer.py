"""LigerSFTTrainer against TRL's: the same numbers in every log, and the same weights."""

import threading
import warnings

import pytest
import torch
import trl.trainer.sft_trainer as trl_sft_trainer
from peft import LoraConfig
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.trainers import fused_head
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from tests.trainers.tiny import (
    COMMON,
    chat_dataset,
    completion_dataset,
    gemma2,
    llama,
    logged,
    mixtral,
    text_dataset,
    tokenizer,
)

DEFAULTS = {**COMMON, "bf16": False, "gradient_checkpointing": False, "max_length": 32}

CASES = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "packing": {"packing": True, "packing_strategy": "bfd"},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "padding_free": {"padding_free": True, "max_length": None},
    "completion_only": {"data": completion_dataset},
    "completion_only_dft": {"data": completion_dataset, "loss_type": "dft"},
    "assistant_only": {"data": chat_dataset, "assistant_only_loss": True},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "moe": {"model": mixtral},
    "moe_accumulation": {"model": mixtral, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "softcap": {"model": gemma2},
    "lora": {"peft": ["q_proj", "v_proj"]},
    "lora_saved_head": {"peft": ["q_proj"], "modules_to_save": ["lm_head"]},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing_reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}


def build(trainer_class, config_class, tmp_path, **case):
    case = dict(case)
    data, model = case.pop("data", text_dataset)(), case.pop("model", llama)()
    peft, saved = case.pop("peft", None), case.pop("modules_to_save", None)
    more = {"eval_dataset": data} if "eval_strategy" in case else {}
    if peft:
        more["peft_config"] = LoraConfig(r=4, target_modules=peft, modules_to_save=saved, lora_dropout=0.0)
    args = config_class(output_dir=str(tmp_path), **{**DEFAULTS, **case})
    return trainer_class(model, args, train_dataset=data, processing_class=tokenizer(), **more)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_logs_and_weights_are_those_of_trl(name, tmp_path):
    stock = build(SFTTrainer, SFTConfig, tmp_path / "stock", **CASES[name])
    stock.train()
    ours = build(LigerSFTTrainer, LigerSFTConfig, tmp_path / "ours", **CASES[name])
    ours.train()
    expected, got = logged(stock), logged(ours)
    assert len(expected) == len(got)
    for left, right in zip(expected, got):
        assert left.keys() == right.keys()
        for key in left:
            assert right[key] == pytest.approx(left[key], abs=1e-5, rel=1e-5), key
    # Adam makes a sign of the smallest gradients, so their rounding shows; one step is 1e-2.
    for (name, a), b in zip(stock.model.named_parameters(), ours.model.parameters()):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-3, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_no_logits_are_built(loss_type, tmp_path, monkeypatch):
    trainer = build(
        LigerSFTTrainer, LigerSFTConfig, tmp_path, loss_type=loss_type, eval_strategy="steps", eval_steps=1, max_steps=1
    )
    seen = []
    original = fused_head.token_statistics
    monkeypatch.setattr(
        fused_head, "token_statistics", lambda logits, *args: seen.append(type(logits)) or original(logits, *args)
    )
    trainer.train()
    assert len(seen) > 1  # training and evaluation
    assert set(seen) == {DeferredLogits}


@pytest.mark.filterwarnings("ignore")
def test_adapter_on_the_head_is_trained(tmp_path):
    with pytest.raises(ValueError, match="lm_head"):
        build(SFTTrainer, SFTConfig, tmp_path, peft=["q_proj", "lm_head"])
    trainer = build(
        LigerSFTTrainer, LigerSFTConfig, tmp_path, peft=["q_proj", "lm_head"], max_grad_norm=0.0, max_steps=1
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.model.zero_grad()
    logits = trainer.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    trainer.train()
    changed = [
        name for name, p in trainer.model.named_parameters() if name in before and not torch.equal(p, before[name])
    ]
    assert any("lm_head.lora_B" in name for name in changed)


@pytest.mark.filterwarnings("ignore")
def test_all_labels_ignored_is_a_zero_that_backpropagates(tmp_path):
    trainer = build(LigerSFTTrainer, LigerSFTConfig, tmp_path)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(0))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in trainer.model.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore")
def test_metrics_get_logits(tmp_path):
    shapes = []

    def compute_metrics(prediction):
        shapes.append((type(prediction.predictions).__name__, prediction.predictions.shape))
        return {"mean": float(prediction.predictions.mean())}

    def run(trainer_class, config_class, name):
        args = config_class(output_dir=str(tmp_path / name), **DEFAULTS)
        data = text_dataset(4)
        trainer = trainer_class(
            llama(), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer(),
            compute_metrics=compute_metrics,
        )  # fmt: skip
        return trainer.evaluate()

    stock = run(SFTTrainer, SFTConfig, "stock")
    ours = run(LigerSFTTrainer, LigerSFTConfig, "ours")
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == "ndarray"
    assert ours["eval_mean"] == pytest.approx(stock["eval_mean"], abs=1e-5)
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-5)


def liger_warnings(caught):
    return [str(w.message) for w in caught if "use_liger_kernel" in str(w.message)]


def test_trl_warns_about_the_flag_only_in_its_own_trainer(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = build(LigerSFTTrainer, LigerSFTConfig, tmp_path, liger_kernel_config={"linear_cross_entropy": True})
    assert liger_warnings(caught) == []
    assert ours.args.use_liger_kernel is True
    assert ours.args.liger_kernel_config == {"linear_cross_entropy": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(SFTTrainer, SFTConfig, tmp_path, use_liger_kernel=True)
    assert len(liger_warnings(caught)) == 1


@pytest.mark.filterwarnings("ignore")
def test_kernels_by_arguments(tmp_path):
    assert build(LigerSFTTrainer, SFTConfig, tmp_path).kernel_report.applied
    off = build(LigerSFTTrainer, LigerSFTConfig, tmp_path, use_liger_kernel=False)
    assert off.kernel_report is None
    assert "trl" in off.model.forward.__func__.__code__.co_filename
    off.train()
    layers = build(LigerSFTTrainer, LigerSFTConfig, tmp_path, liger_kernel_config={"linear_cross_entropy": False})
    assert "trl" in layers.model.forward.__func__.__code__.co_filename
    layers.train()
    args = LigerTrainingArguments(output_dir=str(tmp_path), **COMMON, logits_memory="1MiB")
    trainer = LigerSFTTrainer(llama(), args, train_dataset=text_dataset(), processing_class=tokenizer())
    assert isinstance(trainer.args, LigerSFTConfig)
    assert trainer.args.logits_memory == "1MiB"
    args = TrainingArguments(output_dir=str(tmp_path), **COMMON)
    trainer = LigerSFTTrainer(llama(), args, train_dataset=text_dataset(), processing_class=tokenizer())
    assert trainer.args.use_liger_kernel
    assert trainer.kernel_report.applied


@pytest.mark.filterwarnings("ignore")
def test_stock_trainer_is_untouched(tmp_path):
    theirs = dict(vars(trl_sft_trainer))
    build(LigerSFTTrainer, LigerSFTConfig, tmp_path)
    with pytest.raises(ValueError, match="loss_type"):
        build(LigerSFTTrainer, LigerSFTConfig, tmp_path, loss_type="nonsense")
    for name in ("add_fused_lm_head", "BaseTunerLayer"):
        assert vars(trl_sft_trainer)[name] is theirs[name]
    stock = build(SFTTrainer, SFTConfig, tmp_path)
    assert "trl" in stock.model.forward.__func__.__code__.co_filename


def test_another_thread_gets_trls_head():
    calls = []
    module = type(trl_sft_trainer)("fake")
    module.add_fused_lm_head = lambda *args: calls.append("theirs")
    with fused_head.own_fused_head(module, lambda *args: calls.append("ours")):
        module.add_fused_lm_head()
        thread = threading.Thread(target=module.add_fused_lm_head)
        thread.start()
        thread.join()
    module.add_fused_lm_head()
    assert calls == ["ours", "theirs", "theirs"]


@pytest.mark.filterwarnings("ignore")
def test_model_as_a_path_saves_and_generates(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    args = LigerSFTConfig(output_dir=str(tmp_path / "run"), **DEFAULTS)
    trainer = LigerSFTTrainer(str(tmp_path / "model"), args, train_dataset=text_dataset())
    trainer.train()
    out = trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    trainer.save_model(str(tmp_path / "saved"))
    again = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False), out)
