"""Training steps through the Hugging Face Trainer: `python -m benchmarks.training llama3_8b --with liger_trainer`.

One process measures one model with one set of kernels: random weights and tokens, bf16 weights, fused AdamW, batch
4 x 4096, gradient checkpointing of every layer. It prints one JSON line: tokens/s (median step after the warm-up), peak
GiB and the losses, which must agree between the sets. `--with` takes `none` (the model's own code), `liger`
(liger-kernel through `use_liger_kernel=True`) or `liger_trainer`; `--trainer sft` takes TRL's SFTTrainer instead of the
Trainer, whose own fused head then runs in the first two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def model_config(name: str) -> PretrainedConfig:
    """The published shapes of the benchmarked models."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

    if name == "tiny":
        return LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    if name == "llama3_8b":
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
    if name == "gemma3_4b":
        return Gemma3TextConfig(
            vocab_size=262208,
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
        )
    qwen3 = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    )
    qwen3.head_dim = 128  # read by the model, though not a declared field
    return qwen3


class StepTimes(TrainerCallback):
    """Wall-clock seconds of each step, with the device's work waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)


class RandomTokens(torch.utils.data.Dataset):
    """`length` random token sequences, the same for every run."""

    def __init__(self, size: int, length: int, vocab: int) -> None:
        self.tokens = torch.randint(vocab, (size, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build_trainer(
    kind: str, kernels: str, model: PreTrainedModel, arguments: dict, dataset: RandomTokens, times: StepTimes
) -> Trainer:
    """The trainer of one kind with one set of kernels."""
    if kind == "sft":
        import datasets
        from trl import SFTConfig, SFTTrainer

        from liger_trainer import LigerSFTConfig, LigerSFTTrainer

        ours = kernels == "liger_trainer"
        trainer_class, config_class = (LigerSFTTrainer, LigerSFTConfig) if ours else (SFTTrainer, SFTConfig)
        arguments |= {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        arguments |= {} if ours else {"use_liger_kernel": kernels == "liger"}
        rows = datasets.Dataset.from_list(
            [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in dataset.tokens]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": 0})), pad_token="<pad>")
        return trainer_class(
            model, config_class(**arguments), train_dataset=rows, processing_class=tokenizer, callbacks=[times]
        )
    if kernels == "liger_trainer":
        from liger_trainer import LigerTrainer, LigerTrainingArguments

        return LigerTrainer(model, LigerTrainingArguments(**arguments), train_dataset=dataset, callbacks=[times])
    stock = TrainingArguments(**arguments, use_liger_kernel=kernels == "liger")
    return Trainer(model, stock, train_dataset=dataset, callbacks=[times])


def main() -> None:
    """Measures one configuration and prints it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", "llama3_8b", "gemma3_4b", "qwen3_moe_12l"])
    parser.add_argument("--with", dest="kernels", choices=["none", "liger", "liger_trainer"], default="liger_trainer")
    parser.add_argument("--trainer", choices=["causal_lm", "sft"], default="causal_lm")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--profile", help="write a profiler table of the last step to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_default_device("cuda")
    model = AutoModelForCausalLM.from_config(model_config(args.model), dtype=torch.bfloat16)
    torch.set_default_device("cpu")
    model.config.use_cache = False
    times = StepTimes()
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-5,
        "gradient_checkpointing": not args.no_checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    dataset = RandomTokens(args.batch * args.steps, args.length, model.config.get_text_config().vocab_size)
    trainer = build_trainer(args.trainer, args.kernels, model, arguments, dataset, times)
    torch.cuda.reset_peak_memory_stats()
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            trainer.train()
        with open(args.profile, "w") as file:
            file.write(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=60, max_name_column_width=90))
    else:
        trainer.train()
    seconds = statistics.median(times.seconds[2:])
    result = {
        "model": args.model,
        "trainer": args.trainer,
        "kernels": args.kernels,
        "tokens_per_second": round(args.batch * args.length / seconds),
        "peak_gibibytes": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
