"""Two gloo processes: the stock trainers' numbers, and one decision of the guard for both."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.forked import torchrun
from tests.trainers.parity import build, lora
from tests.trainers.tiny import COMMON, llama, logged, text_dataset, token_rows, tokenizer

PAIRS = {"ours": "stock", "sft_ours": "sft_stock", "dpo_ours": "dpo_stock", "head_ours": "head_naive"}


class PoisonOneRank(LigerTrainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 1 and self.args.process_index == 1:
            self._guard.observe_loss(torch.tensor(float("nan")))
        return loss


def preference(output_dir, ours, settings, **case):
    """Logs of DPO, whose reference model is loaded from the folder of the policy."""
    settings = {
        **settings,
        "gradient_checkpointing": True,
        "own": {"logits_memory": 128 * 4 * 7, "kernel_report": True},
    }
    model = f"{Path(output_dir).parent}/model"
    trainer = build("DPO", ours, output_dir, model, **{**settings, **case})
    trainer.train()
    return logged(trainer)


def work(output_dir):
    settings = {**COMMON, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    results = {}
    for name, trainer_class, args_class in (
        ("stock", Trainer, TrainingArguments),
        ("ours", LigerTrainer, LigerTrainingArguments),
        ("poisoned", PoisonOneRank, LigerTrainingArguments),
    ):
        trainer = trainer_class(
            llama(), args_class(output_dir=f"{output_dir}/{name}", **settings), train_dataset=token_rows()
        )
        trainer.train()
        results[name] = logged(trainer)
        results[f"{name}_steps"] = trainer.state.global_step
    for name, trainer_class, args_class in (
        ("sft_stock", SFTTrainer, SFTConfig),
        ("sft_ours", LigerSFTTrainer, LigerSFTConfig),
    ):
        args = args_class(output_dir=f"{output_dir}/{name}", bf16=False, gradient_checkpointing=False, **settings)
        trainer = trainer_class(llama(), args, train_dataset=text_dataset(), processing_class=tokenizer())
        trainer.train()
        results[name] = logged(trainer)
    for name, ours in (("dpo_stock", False), ("dpo_ours", True)):
        results[name] = preference(f"{output_dir}/{name}", ours, settings)
    for name, ours in (("head_naive", False), ("head_ours", True)):
        results[name] = preference(f"{output_dir}/{name}", ours, settings, naive=not ours, peft_config=lora("lm_head"))
    Path(output_dir, f"rank{args.process_index}.json").write_text(json.dumps(results))


def test_two_processes(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    done = torchrun(work, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for results in ranks:
        assert results["poisoned_steps"] == 2  # both stop, though one of them saw the NaN
        for ours, stock in PAIRS.items():
            for left, right in zip(results[stock], results[ours], strict=True):
                assert left.keys() == right.keys()
                for key in left:
                    assert right[key] == pytest.approx(left[key], abs=1e-5, rel=1e-5), key
    assert done.stdout.count("liger_trainer kernels in") == 5  # the main process alone reports
