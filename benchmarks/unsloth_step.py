"""Unsloth's training step with adapters, measured as `liger-trainer bench training` measures one.

    python benchmarks/unsloth_step.py FOLDER            # LoRA r=16 on Llama-3 8B shapes, 4 x 4096 tokens
    python benchmarks/unsloth_step.py FOLDER --nf4      # on a base in NF4
    python benchmarks/unsloth_step.py FOLDER --model qwen3.5-9b --layers 12  # on a hybrid's first 12 layers

A separate script, because Unsloth patches transformers, must be imported before it, and pins older versions of it. The
script loads a model from FOLDER; the first run saves one there, with the benchmark's random weights (seed 0). Tokens,
batch, optimizer, Trainer, timing and peak are the benchmark's; loading, adapters, checkpointing and kernels are
Unsloth's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

BATCH, LENGTH, RANK, STEPS, WARMUP = 4, 4096, 16, 6, 2
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]  # of gated delta nets
# As in `models.py`, which an environment with Unsloth need not have.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
}


def save_model(folder: Path, model_name: str, layers: int) -> None:
    """Random weights and a tokenizer, which Unsloth asks for."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    values = {**CONFIGURATIONS[model_name], "tie_word_embeddings": False, "use_cache": False}
    values["num_hidden_layers"] = layers or values["num_hidden_layers"]
    vocab = values["vocab_size"]
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3} | {f"w{i}": i for i in range(4, vocab)}
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), **special)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(**values)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def load(folder: Path, nf4: bool) -> Any:
    """Unsloth's model with its adapters."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=LENGTH,
        load_in_4bit=nf4,
        load_in_16bit=not nf4,
        use_gradient_checkpointing="unsloth",
        local_files_only=True,
    )
    layers = [module for name, module in model.named_modules() if name.endswith("layers.0.mlp.down_proj")]
    if not layers:
        raise RuntimeError(f"Unsloth loaded {type(model).__name__}, which has no decoder layers under `layers`.")
    if nf4 and getattr(layers[0].weight, "quant_state", None) is None:
        raise RuntimeError("Unsloth loaded the base without quantising it; is bitsandbytes installed?")
    return FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=0.0,
        bias="none",
        target_modules=LINEARS,
        use_gradient_checkpointing="unsloth",
        max_seq_length=LENGTH,
    )


def train(model: Any) -> tuple[float, float]:
    """Tokens/s of the median step, and the peak in GiB."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[torch.cuda.Event] = []  # as `Steps` of `training_step.py`: the host waits for no step

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()

    tokens = torch.randint(
        model.config.get_text_config().vocab_size, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        bf16=True,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        logging_steps=STEPS,
        save_strategy="no",
        report_to="none",
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(model, arguments, train_dataset=rows, callbacks=[Steps()]).train()
    torch.cuda.synchronize()
    seconds = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(ends[WARMUP - 1 :])]
    return BATCH * LENGTH / statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model, made there unless it exists; 15 GiB")
    parser.add_argument("--nf4", action="store_true", help="quantise the base")
    parser.add_argument("--model", choices=CONFIGURATIONS, default="llama3-8b", help="whose sizes are taken")
    parser.add_argument("--layers", type=int, default=0, help="of the model; default: all")
    parsed = parser.parse_args()
    import unsloth  # noqa: F401 - before transformers

    if not (parsed.folder / "config.json").exists():
        save_model(parsed.folder, parsed.model, parsed.layers)
    rate, peak = train(load(parsed.folder, parsed.nf4))
    what = f"Unsloth, {parsed.model}, LoRA r={RANK}{', NF4' * parsed.nf4}, {BATCH} x {LENGTH}"
    print(f"{what}: {rate:,.0f} tokens/s, peak {peak:.2f} GiB")


if __name__ == "__main__":
    main()
