"""Language modelling on plain text.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B-Base")
model = parser.parse_args().model

source = model or smoke_model("outputs/tiny")
tokenizer = AutoTokenizer.from_pretrained(source)
texts = load_dataset("roneneldan/TinyStories", split="train[:1%]") if model else smoke_data("text")
rows = texts.map(lambda row: tokenizer(row["text"] + tokenizer.eos_token), remove_columns=texts.column_names)

trainer = LigerTrainer(
    AutoModelForCausalLM.from_pretrained(source),
    LigerTrainingArguments(output_dir="outputs/causal_lm", max_steps=-1 if model else 3),
    train_dataset=rows,
    data_collator=DataCollatorWithFlattening(),
    processing_class=tokenizer,
)
trainer.train()
