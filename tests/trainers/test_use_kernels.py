"""TRL's own trainers with `model_init_kwargs={"use_kernels": True}` run our kernels, and train as they do without."""

import pytest
import torch
import transformers.modeling_utils
from transformers import AutoModelForCausalLM, Trainer

from liger_trainer import stock_trainer
from liger_trainer.attention.interface import NAME
from liger_trainer.callbacks.kernel_report import KernelReportCallback
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.stock_trainer import stock_trainer_report
from tests.tiny_models import TINY_MODELS
from tests.trainers.builders import causal
from tests.trainers.parity import assert_close_logs, assert_same_logs, build, lora
from tests.trainers.tiny import logged, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

DOOR = {"model_init_kwargs": {"use_kernels": True}}
KERNELS = {
    "llama": {"rope", "swiglu", "rms_norm", "attention"},
    "qwen3_moe": {"rope", "experts", "router", "rms_norm", "attention"},
    "gemma3_text": {"rope", "geglu", "rms_norm", "attention"},
}
CASES = {"SFT": {}, "DPO": {}, "GRPO": {"beta": 0.1}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in KERNELS}
    for name, folder in folders.items():
        TINY_MODELS[name]().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folders


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(transformers.modeling_utils, "kernelize", lambda *_, **__: pytest.fail("the library was asked"))


def trained(kind, folder, model, **options):
    """A trainer of TRL after its training, which draws with the seed that `build` has set."""
    trainer = build(kind, False, folder, str(model), **CASES[kind], **options)
    trainer.train()
    return trainer


def components(trainer):
    return {row.component for row in stock_trainer_report(trainer.model).applied}


@pytest.mark.parametrize("model", KERNELS)
@pytest.mark.parametrize("kind", CASES)
def test_losses_are_those_without_kernels(kind, model, models, tmp_path):
    stock, ours = (trained(kind, tmp_path, models[model], **options) for options in ({}, DOOR))
    assert not any(map(is_bound_by_us, stock.model.modules()))
    assert KERNELS[model] <= components(ours)
    assert ours.model.config._attn_implementation == NAME
    assert "trl" in ours.model.forward.__func__.__code__.co_filename  # the head is TRL's
    if kind != "SFT":
        assert KERNELS[model] <= {row.component for row in stock_trainer_report(ours.ref_model).applied}
    assert_same_logs(stock, ours)


@pytest.mark.parametrize("kind", CASES)
def test_adapters_have_their_kernels_from_the_first_step_on(kind, models, tmp_path, caplog):
    stock, ours, flag = (
        trained(kind, tmp_path, models["llama"], peft_config=lora(), **options)
        for options in ({}, DOOR, {"use_liger_kernel": True})
    )
    assert components(ours) == components(flag) >= KERNELS["llama"] | {"lora"}
    assert "has been changed" not in caplog.text
    assert_same_logs(stock, ours)


def test_adapters_have_their_kernels_before_the_model_is_wrapped(models, tmp_path, capsys):
    trainer = build("SFT", False, tmp_path, str(models["llama"]), peft_config=lora(), **DOOR)
    trainer.add_callback(KernelReportCallback())  # which looks when training begins
    trainer.train()
    assert capsys.readouterr().out.count("lora_linear") == 1


def test_continuous_batching(models, tmp_path):
    batching = {"num_blocks": 32, "max_batch_tokens": 64}
    options = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": batching}
    stock, ours = (trained("GRPO", tmp_path, models["llama"], bf16=False, **options, **door) for door in ({}, DOOR))
    assert ours.model.config._attn_implementation == NAME
    assert_same_logs(stock, ours)


def test_with_both_switches_the_configuration_of_the_trainer_decides(models, tmp_path):
    both = {**DOOR, "use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    stock, ours = (
        trained("SFT", tmp_path, models["llama"], eval_strategy="steps", eval_steps=1, **options)
        for options in ({}, both)
    )
    assert components(ours) == {"swiglu", "rms_norm", "attention"}
    assert not is_bound_by_us(ours.model.model.layers[0].self_attn)
    assert_same_logs(stock, ours)


def test_the_trainer_of_transformers_gets_the_head_too(models, tmp_path, capsys):
    stock, model = (AutoModelForCausalLM.from_pretrained(models["llama"], use_kernels=on) for on in (False, True))
    trainers = [causal(tmp_path, each, trainer_class=Trainer, max_steps=2) for each in (stock, model)]
    trainers[1].add_callback(KernelReportCallback())
    for trainer in trainers:
        trainer.train()
    assert components(trainers[1]) == KERNELS["llama"] | {"linear_cross_entropy"}
    assert capsys.readouterr().out.count("liger_trainer kernels in LlamaForCausalLM") == 1
    assert_close_logs(logged(trainers[1]), logged(trainers[0]))


def test_a_trainer_of_ours_has_its_own_configuration(models, tmp_path):
    own = {"liger_kernel_config": {"rope": False}}
    trainer = build("DPO", True, tmp_path, str(models["llama"]), eval_strategy="steps", eval_steps=1, own=own, **DOOR)
    trainer.train()
    assert "rope" not in {row.component for row in trainer.kernel_report.applied}
    assert not is_bound_by_us(trainer.model.model.layers[0].self_attn)
    assert not is_bound_by_us(trainer.ref_model.model.layers[0].self_attn)


def test_data_parallel_is_refused(models, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(models["llama"], use_kernels=True)
    trainer = causal(tmp_path, model, trainer_class=Trainer)
    monkeypatch.setattr(stock_trainer, "_data_parallel_is_next", lambda model: True)
    with pytest.raises(ValueError, match="accelerate launch"):
        trainer.train()
    model.set_use_kernels(False)
    trainer.train()


def test_a_generation_uses_no_mask_that_is_not_there(models):
    batch = tokenizer()(["the cat sat", "a dog"], return_tensors="pt", padding=True, padding_side="left")
    batch.pop("token_type_ids", None)
    texts = [
        AutoModelForCausalLM.from_pretrained(models["llama"], use_kernels=on).generate(
            **batch, max_new_tokens=8, do_sample=False
        )
        for on in (False, True)
    ]
    assert torch.equal(*texts)
