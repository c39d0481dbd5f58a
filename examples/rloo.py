"""RLOO: reinforcement learning from reward functions.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset

from liger_trainer import LigerRLOOConfig, LigerRLOOTrainer, rewards
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B")
model = parser.parse_args().model


def short(completions, **columns):
    """A reward of one's own, for short answers: one number for each completion."""
    return [-len(rewards.completion_text(completion)) / 1000 for completion in completions]


trainer = LigerRLOOTrainer(
    model=model or smoke_model("outputs/tiny"),
    reward_funcs=[rewards.accuracy, short],  # `accuracy` compares with the column `solution`
    args=LigerRLOOConfig(
        output_dir="outputs/rloo",
        num_generations=4,
        max_completion_length=512 if model else 16,
        max_steps=-1 if model else 3,
    ),
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train") if model else smoke_data("prompt"),
)
trainer.train()
