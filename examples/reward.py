"""A reward model, from pairs of a chosen and a rejected answer.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset

from liger_trainer import LigerRewardConfig, LigerRewardTrainer
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B")
model = parser.parse_args().model

trainer = LigerRewardTrainer(
    model=model or smoke_model("outputs/tiny"),
    args=LigerRewardConfig(output_dir="outputs/reward", max_steps=-1 if model else 3),
    train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train") if model else smoke_data("preference"),
)
trainer.train()
