"""LigerSFTTrainer against TRL's: the same numbers in every log, and the same weights."""

import functools
import warnings

import pytest
import torch
from peft import LoraConfig
from trl import SFTTrainer

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerSFTConfig
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from tests.patching.mixing_models import built
from tests.trainers.builders import sft
from tests.trainers.parity import assert_close_weights, assert_same_logs
from tests.trainers.tiny import (
    COMMON,
    chat_dataset,
    completion_dataset,
    gemma2,
    llama,
    mixtral,
    text_dataset,
    tokenizer,
)

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


def build(folder, trainer_class=LigerSFTTrainer, data=text_dataset, model=llama, peft=None, **options):
    data, saved = data(), options.pop("modules_to_save", None)
    if "eval_strategy" in options:
        options["eval_dataset"] = data
    if peft:
        options["peft_config"] = LoraConfig(r=4, target_modules=peft, modules_to_save=saved, lora_dropout=0.0)
    return sft(folder, model(), trainer_class, data, **{"max_length": 32, **options})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_logs_and_weights_are_those_of_trl(name, tmp_path):
    stock = build(tmp_path / "stock", SFTTrainer, **CASES[name])
    stock.train()
    ours = build(tmp_path / "ours", **CASES[name])
    ours.train()
    assert_same_logs(stock, ours)
    # Adam makes a sign of the smallest gradients, so their rounding shows; one step is 1e-2.
    assert_close_weights(ours, stock, tolerance=2e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "falcon_h1", "granitemoehybrid"])
def test_rows_without_padding_of_a_hybrid_model_are_those_of_the_padded_batch(name, tmp_path):
    """TRL's own such rows have the state of one document in the next, or need other packages."""
    case = {"model": functools.partial(built, name), "max_length": None, "adam_epsilon": 1e-2}
    if name == "granitemoehybrid":
        case["router_aux_loss_coef"] = 0.0  # TRL asks its config for a name that it does not have
    stock = build(tmp_path / "stock", SFTTrainer, **case)
    stock.train()
    ours = build(tmp_path / "ours", padding_free=True, **case)
    ours.train()
    for trainer in (stock, ours):
        trainer.state.log_history[-1].pop("total_flos")  # fewer, without padding
    assert_same_logs(stock, ours)
    assert_close_weights(ours, stock, tolerance=2e-3)


@pytest.mark.filterwarnings("ignore")
def test_adapter_on_the_head_is_trained(tmp_path):
    with pytest.raises(ValueError, match="lm_head"):
        build(tmp_path, SFTTrainer, peft=["q_proj", "lm_head"])
    trainer = build(tmp_path, peft=["q_proj", "lm_head"], max_grad_norm=0.0, max_steps=1)
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
    trainer = build(tmp_path)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(0))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in trainer.model.parameters() if p.grad is not None)


def liger_warnings(caught):
    return [str(w.message) for w in caught if "use_liger_kernel" in str(w.message)]


def test_trl_warns_about_the_flag_only_in_its_own_trainer(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = build(tmp_path, liger_kernel_config={"linear_cross_entropy": True})
    assert liger_warnings(caught) == []
    assert ours.args.use_liger_kernel is True
    assert ours.args.liger_kernel_config == {"linear_cross_entropy": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(tmp_path, SFTTrainer, use_liger_kernel=True)
    assert len(liger_warnings(caught)) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("off", [{"use_liger_kernel": False}, {"liger_kernel_config": {"linear_cross_entropy": False}}])
def test_without_our_head_it_trains_with_trls(off, tmp_path):
    trainer = build(tmp_path, **off)
    assert "trl" in trainer.model.forward.__func__.__code__.co_filename
    trainer.train()


@pytest.mark.filterwarnings("ignore")
def test_settings_of_our_training_arguments_are_taken_over(tmp_path):
    args = LigerTrainingArguments(str(tmp_path), **COMMON, logits_memory="1MiB")
    trainer = LigerSFTTrainer(llama(), args, train_dataset=text_dataset(), processing_class=tokenizer())
    assert isinstance(trainer.args, LigerSFTConfig)
    assert trainer.args.logits_memory == "1MiB"


@pytest.mark.filterwarnings("ignore")
def test_model_as_a_path_saves_and_generates(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    args = LigerSFTConfig(str(tmp_path / "run"), **COMMON, bf16=False)
    trainer = LigerSFTTrainer(str(tmp_path / "model"), args, train_dataset=text_dataset())
    trainer.train()
    out = trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    trainer.save_model(str(tmp_path / "saved"))
    again = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False), out)
