"""A tiny model's folder without weights, recipes of it, and what the checks find in them."""

import json
from pathlib import Path

from liger_trainer.tools.diagnosis.diagnose import diagnose
from liger_trainer.tools.diagnosis.sample import read_case
from tests.tools.cli.runs import write_recipe
from tests.trainers.tiny import CHAT_TEMPLATE, SIZES, WORDS, tokenizer

GENERATION = {"assistant_only_loss": True, "eos_token": "<|im_end|>"}


def model_folder(path, chat_template=CHAT_TEMPLATE, **config):
    """A folder with a configuration and the tiny tokenizer, and its name."""
    made = tokenizer()
    made.chat_template = chat_template
    made.save_pretrained(path)
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, "initializer_range": 0.02}
    values["max_position_embeddings"] = 32768
    (Path(path) / "config.json").write_text(json.dumps({**values, **config}))
    return str(path)


def data_file(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def chats(n=16, answer=None):
    """Conversations of one question and one answer."""
    said = [(WORDS[i % 4], answer or WORDS[(i + 1) % 4]) for i in range(n)]
    return [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in said]


def recipe(folder, rows=None, **values):
    """Writes an SFT recipe without a trap, with `values` on top, and gives its path."""
    base = {
        "trainer": "sft",
        "model_name_or_path": values.pop("model", None) or model_folder(folder / "model"),
        "data_files": data_file(folder / "data.jsonl", chats() if rows is None else rows),
        "output_dir": str(folder / "run"),
        "max_length": 256,
        **GENERATION,
    }
    if values.get("trainer", "sft") != "sft":
        base = {key: value for key, value in base.items() if key not in GENERATION}
    if values.get("trainer") == "grpo":
        del base["max_length"]
    return write_recipe(folder / "mine.yaml", {**base, **values})


def found_in(path, *options):
    return diagnose(read_case(path, options))


def traps_of(path, *options):
    """The text of every trap."""
    return [str(trap) for trap in found_in(path, *options).traps]
