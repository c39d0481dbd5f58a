"""ORPO: supervised fine-tuning and preferences at once, without a reference model.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset

from liger_trainer import LigerORPOConfig, LigerORPOTrainer
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B")
model = parser.parse_args().model

trainer = LigerORPOTrainer(
    model=model or smoke_model("outputs/tiny"),
    args=LigerORPOConfig(output_dir="outputs/orpo", beta=0.1, max_steps=-1 if model else 3),
    train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train") if model else smoke_data("preference"),
)
trainer.train()
