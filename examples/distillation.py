"""Distillation on policy: the student answers, and learns what the teacher would have said.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset

from liger_trainer import LigerDistillationConfig, LigerDistillationTrainer
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B")
parser.add_argument("--teacher", help="a larger one with the same tokenizer, such as Qwen/Qwen3-4B")
arguments = parser.parse_args()
if bool(model := arguments.model) != bool(teacher := arguments.teacher):
    parser.error("--model and --teacher: give both, or neither")

trainer = LigerDistillationTrainer(
    model=model or smoke_model("outputs/tiny"),
    teacher_model=teacher or smoke_model("outputs/tiny_teacher"),
    args=LigerDistillationConfig(
        output_dir="outputs/distillation",
        max_completion_length=256 if model else 16,
        max_steps=-1 if model else 3,
    ),
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train") if model else smoke_data("prompt"),
)
trainer.train()
