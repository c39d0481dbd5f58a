"""A folder with tiny models and data under the names of the Hub; a relative folder comes before the Hub."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer.recipe.smoke import train_tokenizer
from tests.packed_checkpoints import write_dense


def save_hub(root: Path) -> Path:
    """Writes what README, the documentation and the examples load into `root`, the working directory to be."""
    text = [f"The answer to question {number} is {number * 3}." for number in range(50)]
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": line}] for line in text]
    tokenizer = train_tokenizer(text, 300)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**size, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    llamas = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct")
    for model in (*llamas, "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"):  # the blocks do not depend on the architecture
        LlamaForCausalLM(config).save_pretrained(root / model)
        tokenizer.save_pretrained(root / model)
    write_dense(root / "Qwen/Qwen3-8B-FP8", "fp8 blocks")
    tokenizer.save_pretrained(root / "Qwen/Qwen3-8B-FP8")
    for data, rows in (
        ("my/texts", [{"text": line} for line in text]),
        ("roneneldan/TinyStories", [{"text": line} for line in text * 4]),  # an example takes a hundredth
        ("trl-lib/Capybara", [{"messages": row} for row in turns]),
        ("trl-lib/ultrafeedback_binarized", [{"chosen": row, "rejected": bad} for row, bad in zip(turns, turns[::-1])]),
        (
            "trl-lib/kto-mix-14k",
            [{"prompt": row[:1], "completion": row[1:], "label": row in turns[::2]} for row in turns],
        ),
        ("trl-lib/DeepMath-103K", [{"prompt": row[:1], "solution": "$3$"} for row in turns]),
    ):
        (root / data).mkdir(parents=True)
        (root / data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root
