"""`fp8_base` in the trainers: losses near those of a bf16 base, resuming, references, and what is refused."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from liger_trainer import LigerTrainingArguments
from liger_trainer.patching.lora.low_bit import Fp8Linear
from liger_trainer.trainers.checks import low_bit
from tests.trainers.builders import causal, dpo, losses_and_norms
from tests.trainers.parity import assert_close_weights
from tests.trainers.tiny import llama

ARGUMENTS = {"bf16": True, "gradient_checkpointing": True, "learning_rate": 1e-2, "max_steps": 8, "fp8_base": True}


def adapted(dtype=torch.bfloat16, **lora):
    model = llama(hidden_size=64, intermediate_size=128).to(dtype)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM", **lora))


def stored(model):
    return sum(isinstance(module, Fp8Linear) for module in model.modules())


def test_losses_are_near_those_of_a_base_in_bf16(tmp_path):
    options = {**ARGUMENTS, "gradient_accumulation_steps": 2, "activation_memory": "1MiB"}
    ours, usual = (causal(tmp_path, adapted(), **{**options, "fp8_base": fp8}) for fp8 in (True, False))
    (row,) = (row for row in ours.kernel_report if row.component == "fp8_base")
    assert (row.kernel, row.count, stored(ours.model)) == ("fp8 (e4m3), a scale for each row", 14, 14)
    for trainer in (ours, usual):
        trainer.train()
    got, expected = (losses_and_norms(trainer)[::2] for trainer in (ours, usual))
    assert expected[-1] < 0.97 * expected[0]
    assert got != expected
    assert got == pytest.approx(expected, rel=5e-3)
    assert ours.evaluate(ours.train_dataset)["eval_loss"] == pytest.approx(
        usual.evaluate(usual.train_dataset)["eval_loss"], rel=5e-3
    )


def test_scales_are_not_said_to_be_missing_from_a_checkpoint(tmp_path, caplog):
    """Nor are the layers said to have no kernel."""
    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))
    trainer = causal(tmp_path / "run", model, **{**ARGUMENTS, "max_steps": 1})
    trainer.train()
    assert stored(model) == 14
    assert "checkpoint had no" not in caplog.text
    assert not [row for row in trainer.kernel_report if row.component == "other" and row.target == "Fp8Linear"]


class StopAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_resumed_run_has_the_same_bits(tmp_path):
    options = {**ARGUMENTS, "max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    whole = causal(tmp_path / "whole", adapted(lora_dropout=0.1), **options)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        causal(tmp_path / "half", adapted(lora_dropout=0.1), callbacks=[StopAt()], **options).train()
    saved = load_file(tmp_path / "half" / "checkpoint-2" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in saved)
    resumed = causal(tmp_path / "half", adapted(lora_dropout=0.1), **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses_and_norms(resumed) == losses_and_norms(whole)
    assert_close_weights(resumed, whole, tolerance=0)


@pytest.mark.parametrize("before", [True, False])
def test_resuming_with_another_value_is_said(before, tmp_path, caplog):
    options = {**ARGUMENTS, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    causal(tmp_path, adapted(), **{**options, "fp8_base": before}).train()

    def resumed(value):
        caplog.clear()
        trainer = causal(tmp_path, adapted(), **{**options, "fp8_base": value})
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert trainer.state.global_step == 2
        return caplog.text

    assert "in the checkpoint and" not in resumed(before)
    assert f"checkpoint-1: `fp8_base` is {before} in the checkpoint and {not before} here. This run" in resumed(
        not before
    )
    state = torch.load(tmp_path / "checkpoint-1" / "rng_state.pth", weights_only=False)
    del state["liger_trainer"]["rounding"]  # of an earlier version
    torch.save(state, tmp_path / "checkpoint-1" / "rng_state.pth")
    assert "in the checkpoint and" not in resumed(not before)


def test_a_reference_is_the_stored_base(tmp_path):
    """Before its first step an adapter changes nothing, so that policy and reference agree."""
    trainer = dpo(tmp_path, adapted(), **{**ARGUMENTS, "max_steps": 2})
    trainer.train()
    assert stored(trainer.model) == 14
    assert losses_and_norms(trainer)[0] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-4)


def test_each_new_model_is_stored(tmp_path):
    trainer = causal(tmp_path, model_init=lambda: adapted(), **ARGUMENTS)
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert stored(first) == stored(trainer.model) == 14
    assert stored(causal(tmp_path, adapted(), **ARGUMENTS, bf16_full_eval=True).model) == 14  # which is moved later


def test_models_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`fp8_base` is true, but the model has no adapters, and trains its weights"):
        causal(tmp_path, **ARGUMENTS)
    other = get_peft_model(llama(), IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="the model has adapters of the kind IA3"):
        causal(tmp_path, other, **ARGUMENTS)
    quantised = adapted()
    quantised.get_base_model().is_quantized = True
    with pytest.raises(ValueError, match="the model is quantised already"):
        low_bit._check_model("", quantised)
    with pytest.raises(ValueError, match="`use_liger_kernel` is false"):
        causal(tmp_path, adapted(), **ARGUMENTS, use_liger_kernel=False)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("is_fsdp_enabled", "FSDP"),
        ("is_deepspeed_enabled", "DeepSpeed"),
        ("is_distributed_loading_by_transformers", "`distributed_config`"),
        ("get_tp_size", "tensor parallelism"),
        ("use_vllm", "vLLM"),
    ],
)
def test_launches_that_are_refused(name, way, tmp_path, monkeypatch):
    trainer = causal(tmp_path, adapted(), **{**ARGUMENTS, "fp8_base": False})
    if name == "use_vllm":
        trainer.args.use_vllm = True
    else:
        monkeypatch.setattr(trainer, name, (lambda: 2) if name == "get_tp_size" else True, raising=False)
    with pytest.raises(ValueError, match=f"`fp8_base` is true, but {way} (splits|gets)"):
        low_bit.store_base(trainer, trainer.model)
    assert not stored(trainer.model)


def test_a_device_without_fp8_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(low_bit, "has_fp8", lambda device: False)
    with pytest.raises(ValueError, match="but cpu has no fp8 matmuls with a scale for each row"):
        causal(tmp_path, adapted(), **ARGUMENTS)


def test_another_value_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`fp8_base` is 'e4m3'; it must be true or false"):
        LigerTrainingArguments(output_dir=str(tmp_path), fp8_base="e4m3", use_cpu=True)
