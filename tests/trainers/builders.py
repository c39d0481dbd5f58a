"""Trainers of tiny models, stock ones and ours, as most tests of this folder build them."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerDPOConfig, LigerSFTConfig
from liger_trainer.trainers.reference_trainers import LigerDPOTrainer
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.tiny import COMMON, WORDS, llama, text_dataset, token_rows, tokenizer

FURTHER = (
    *("callbacks", "compute_loss_func", "compute_metrics", "data_collator", "eval_dataset", "model_init"),
    *("optimizer_cls_and_kwargs", "peft_config", "preprocess_logits_for_metrics", "processing_class"),
)
"""What `causal` and `sft` pass to the trainer; all else are settings."""


def causal(folder: Any, model: Any = None, trainer_class: Any = LigerTrainer, rows: Any = None, **options: Any) -> Any:
    """A trainer of transformers, or ours, on rows of token ids."""
    args_class = LigerTrainingArguments if issubclass(trainer_class, LigerTrainer) else TrainingArguments
    further = {name: options.pop(name) for name in FURTHER if name in options}
    args = args_class(str(folder), **{**COMMON, **options})
    model = model or (None if "model_init" in further else llama())
    return trainer_class(model, args, train_dataset=token_rows() if rows is None else rows, **further)


def sft(folder: Any, model: Any = None, trainer_class: Any = LigerSFTTrainer, data: Any = None, **options: Any) -> Any:
    """TRL's trainer for SFT, or ours, on texts."""
    args_class = LigerSFTConfig if issubclass(trainer_class, LigerSFTTrainer) else SFTConfig
    further = {"processing_class": tokenizer(), **{name: options.pop(name) for name in FURTHER if name in options}}
    args = args_class(str(folder), **{**COMMON, "bf16": False, "gradient_checkpointing": False, **options})
    return trainer_class(model or llama(), args, train_dataset=text_dataset() if data is None else data, **further)


def dpo(folder: Any, model: Any, reference: Any = None, trainer_class: Any = LigerDPOTrainer, **options: Any) -> Any:
    """Our trainer for DPO on pairs; the reference of an adapted model is that without the adapter."""
    rows = [{"prompt": WORDS[i % 4], "chosen": WORDS[(i + 1) % 4], "rejected": WORDS[(i + 2) % 4]} for i in range(16)]
    args = LigerDPOConfig(str(folder), **{**COMMON, "bf16": False, "gradient_checkpointing": False, **options})
    if reference is None and not hasattr(model, "peft_config"):
        reference = llama()
    data = Dataset.from_list(rows)
    return trainer_class(model, reference, args, train_dataset=data, processing_class=tokenizer())


def losses_and_norms(trainer: Any) -> list[float]:
    """The loss and the gradient norm of every training log."""
    return [log[key] for log in trainer.state.log_history if "loss" in log for key in ("loss", "grad_norm")]
