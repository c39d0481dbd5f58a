"""The Liger trainers with experts on two gloo processes, beside the stock trainer with all of them in one."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

pytest.importorskip("transformers.distributed")

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerSFTConfig
from liger_trainer.trainers.checks.launch import check_launch
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.tiny_models import TINY_MODELS
from tests.trainers.parity import assert_close_logs, results_of_processes
from tests.trainers.tiny import COMMON, logged, text_dataset, token_rows, tokenizer

# A large epsilon makes a step a smooth function of the gradient, and rounding stays small.
STEPS = {**COMMON, "max_steps": 4, "lr_scheduler_type": "linear", "adam_epsilon": 1e-2, "optim": "adamw_torch"}
CASES = {
    "trainer": {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2},
    "SFT": {"gradient_checkpointing": True},
    "SFT, lora": {},
}
SAVES = {"save_strategy": "steps", "save_steps": 2}
RESUMED = ("trainer", "SFT, lora")
SPLIT = {"fsdp_size": 2, "ep_size": 2}
OWN_TO_A_PROCESS = {"total_flos", "aux_loss"}  # the last is no mean over tokens; it counts a thousandth


def build(name, folder, ours, split, run, **more):
    """A trainer of `CASES` on the model in `folder`; one of two processes gets half a batch."""
    settings = {**STEPS, **CASES[name], **more, "per_device_train_batch_size": 2 if split else 4}
    settings["output_dir"] = f"{folder}/{run}"
    if ours and name == "SFT":
        settings["activation_memory"] = "1GiB"
    loading = {"dtype": "float32", "distributed_config": SPLIT} if split else {"dtype": "float32"}
    if name != "trainer":
        config_class, trainer_class = (LigerSFTConfig, LigerSFTTrainer) if ours else (SFTConfig, SFTTrainer)
        args = config_class(**settings, bf16=False, model_init_kwargs={"device_map": None, **loading})
        data = {"train_dataset": text_dataset(), "processing_class": tokenizer()}
        if name == "SFT, lora":
            data["peft_config"] = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
        return trainer_class(f"{folder}/model", args, **data)
    config_class, trainer_class = (LigerTrainingArguments, LigerTrainer) if ours else (TrainingArguments, Trainer)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", **loading)
    return trainer_class(model, config_class(**settings), train_dataset=token_rows())


def train(*args, resume=None, **kwargs):
    trainer = build(*args, **kwargs)
    if trainer.args.world_size > 1:
        (row,) = (row for row in trainer.kernel_report if row.kernel == "expert exchange")
        assert row.count == 2, row
    trainer.train(resume_from_checkpoint=resume)
    kept = getattr(trainer, "_kept", None)
    assert kept is None or kept.kept > 0
    return trainer


def work(folder):
    results = {name: logged(train(name, folder, True, True, name)) for name in CASES}
    for name in RESUMED:
        whole = train(name, folder, True, True, f"{name}, whole", **SAVES)
        middle = f"{folder}/{name}, whole/checkpoint-2"
        resumed = train(name, folder, True, True, f"{name}, resumed", resume=middle, **SAVES)
        for kind, trainer in (("whole", whole), ("resumed", resumed)):
            trainer.save_model(f"{folder}/{name}, {kind}/final")
            logs = [log for log in trainer.state.log_history if "loss" in log]
            results[f"{name}, {kind}"] = [[log["loss"], log["grad_norm"], log["learning_rate"]] for log in logs]
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    TINY_MODELS["qwen3_moe"](output_router_logits=False).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder, results_of_processes(work, folder, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")


def check_logs(ours, expected, tolerance):
    """Raises where two trainings log other numbers."""
    assert_close_logs(ours, expected, OWN_TO_A_PROCESS, absolute=tolerance / 5, relative=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_log_what_one_does(name, ranks):
    folder, results = ranks
    expected = logged(train(name, folder, False, False, f"{name} alone"))
    for rank in results:
        check_logs(rank[name], expected, tolerance=1e-4)


def test_a_checkpoint_is_that_of_one_process(ranks):
    folder, _ = ranks
    alone = train("trainer", folder, False, False, "saved alone", **SAVES)
    files = {path.name for path in (folder / "trainer, whole" / "checkpoint-2").iterdir()}
    stock = {path.name for path in (folder / "saved alone" / "checkpoint-2").iterdir()}
    assert files - stock == {"optimizer", "rng_state_0.pth", "rng_state_1.pth"}
    assert stock - files == {"optimizer.pt", "rng_state.pth"}
    loaded = AutoModelForCausalLM.from_pretrained(folder / "trainer, whole" / "final")
    for name, parameter in alone.model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RESUMED)
def test_resumes_to_the_same_losses_and_weights(name, ranks):
    folder, results = ranks
    for rank in results:
        assert rank[f"{name}, resumed"] == rank[f"{name}, whole"]
    file = "adapter_model.safetensors" if name == "SFT, lora" else "model.safetensors"
    whole, resumed = (load_file(folder / f"{name}, {kind}" / "final" / file) for kind in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key


def test_a_model_is_split_once():
    trainer = SimpleNamespace(
        args=SimpleNamespace(n_gpu=1),
        get_cp_size=lambda: 1,
        get_sp_size=lambda: 1,
        _ranks=None,
        is_distributed_loading_by_transformers=True,
        is_fsdp_enabled=False,
        is_deepspeed_enabled=False,
    )
    check_launch(trainer, takes_parts_of_sequences=True)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"would split it again with FSDP\. Launch it with `torchrun`"):
        check_launch(trainer, takes_parts_of_sequences=True)
