"""A step on recorded rollouts: all shared levels, one, none, and the prefix trie of TRL's asynchronous GRPO.

    python -m liger_trainer.benchmarks.tree_step --model qwen3-4b --lora 16

Nothing is generated: random tokens, advantages and log-probabilities are given. A row is a context and the completion
behind it, which alone is trained. There are two shapes:

- `groups`: `--groups` prompts of `--prompt` tokens, `--group` completions each, as long as `--lengths` says.
- `tree`: a system prompt of `--system` tokens, `--groups` prompts behind it, and `--conversations` behind each, of
  `--turns` turns. A turn is an answer, of `--lengths`, and a result of `--result` tokens. Each answer ends a row, whose
  context is the answers and results before it: a row begins the row of the next turn. When half of its turns are over,
  a conversation goes on in two ways.

The real trainers run, forward, backward and optimizer, on one batch of all rows a step. Ours is GRPO's; TRL's
`AsyncGRPOTrainer` has its own queue, trie, packing and loss, but no worker and no vLLM. Weights are the same, in bf16
on a GPU, and losses of the first step agree up to rounding. TRL attends with flash attention 3 from the Hub; unless
`--flash3` is given, torch's flash attention takes its place, which ours runs too.

Rows' tokens are those of each row alone, without padding. The time is from the end of a step to that of the next: the
host's work on a batch counts where the device waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import queue
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM

from liger_trainer.benchmarks.device import Device, find_device
from liger_trainer.benchmarks.measure import explain
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.records import UNSHARED
from liger_trainer.benchmarks.registry import BenchmarkError, closest
from liger_trainer.benchmarks.report import make_console, make_table, milliseconds, number
from liger_trainer.benchmarks.training import Task, parse_lengths
from liger_trainer.benchmarks.training_providers import Setup
from liger_trainer.benchmarks.training_step import Steps, training_arguments
from liger_trainer.packing import packing

TRL, ONE_LEVEL, TREE = "trl", "liger_trainer one level", "liger_trainer"
PROVIDERS = (TRL, UNSHARED, ONE_LEVEL, TREE)
SHAPES = ("groups", "tree")
WARMUP = 4  # the third step times whether graphs gain, and captures them


class Rollouts:
    """The rows of a step, and what was recorded of them.

    Args:
        shape: `groups` or `tree`.
        sizes: The command's options.
        vocab: Token ids are below it.

    Attributes:
        prompt: How many tokens the prompt of each row has, system prompt included.
        tokens: (B, S), with 0 behind the rows.
        lengths: (B, 1), how many of them each row has.
        trained: (B, S), 1 for the tokens of completions.
        old: (B, S), the log-probabilities when they were drawn: near those of random weights.
        advantages: (B,).
    """

    def __init__(self, shape: str, sizes: argparse.Namespace, vocab: int) -> None:
        draw, lengths = random.Random(0), parse_lengths(sizes.lengths)
        rows, begins = [], []

        def new(count: int) -> list[int]:
            return draw.choices(range(vocab), k=count)

        def turns(context: list[int], left: int) -> None:
            rows.append(context + new(draw.randint(*lengths)))
            begins.append([len(context)])
            ways = 0 if left == 1 else 2 if left - 1 == sizes.turns // 2 else 1
            row = rows[-1]
            for _ in range(ways):
                turns(row + new(sizes.result), left - 1)

        is_tree = shape == "tree"
        system = new(sizes.system) if is_tree else []
        for _ in range(sizes.groups):
            prompt = system + new(sizes.prompt)
            for _ in range(sizes.conversations if is_tree else sizes.group):
                turns(prompt, sizes.turns if is_tree else 1)
        self.prompt = len(prompt)
        self.tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        self.lengths = torch.tensor([[len(row)] for row in rows])
        columns = torch.arange(self.tokens.shape[1])
        self.trained = ((columns >= torch.tensor(begins)) & (columns < self.lengths)).long()
        noise = torch.randn(self.tokens.shape, generator=torch.Generator().manual_seed(0))
        self.old = 0.1 * noise - math.log(vocab)
        self.advantages = torch.linspace(-1.0, 1.5, len(rows))

    def padded(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What GRPO's loss takes, as new tensors: those that were packed before would not be packed again."""
        prompts, completions = self.tokens.tensor_split([self.prompt], dim=1)
        batch = {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": (torch.arange(completions.shape[1]) < self.lengths - self.prompt).long(),
            "tool_mask": self.trained[:, self.prompt :],
            "advantages": self.advantages,
            "old_per_token_logps": self.old[:, self.prompt :],
            "num_items_in_batch": self.trained.sum(),
        }
        return {name: tensor.to(device, copy=True) for name, tensor in batch.items()}

    def samples(self) -> Iterator[Any]:
        """The same for TRL's queue."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        recorded = {"input_ids": self.tokens, "completion_mask": self.trained, "old_log_probs": self.old}
        for row, length in enumerate(self.lengths.flatten().tolist()):
            known: dict[str, Any] = {name: each[row, :length].numpy() for name, each in recorded.items()}
            known |= {"advantage": self.advantages[row].item(), "group_id": 0, "model_version": 0, "metrics": {}}
            yield RolloutSample(prompt=[], completion=[], **known)


class Recorded:
    """In the place of TRL's worker and of its transfer of weights: rollouts that are there already."""

    def __init__(self, samples: list[Any]) -> None:
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def tree_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """TRL's function of this name with torch's attention: each segment of the trie sees the path to it, and itself."""
    names = ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_max_seqlen_q", "tree_max_seqlen_k")
    if kwargs.get("sliding_window") or kwargs.get("softcap"):
        raise RuntimeError("windows and soft-caps need `--flash3`")
    queries, keys, most_queries, most_keys = (kwargs[name] for name in names)
    q, k, v = (x.transpose(1, 2)[0].to(value.dtype) for x in (query, key, value))
    k, v = (x.index_select(0, kwargs["tree_kv_index"]) for x in (k, v))
    options: dict[str, Any] = {"scale": kwargs.get("scaling"), "enable_gqa": True}
    if q.is_cpu:
        parts = []
        for begin, end, first, last in zip(queries, queries[1:], keys, keys[1:]):
            own, path, values = (x.transpose(0, 1)[None] for x in (q[begin:end], k[first:last], v[first:last]))
            seen = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
            parts.append(F.scaled_dot_product_attention(own, path, values, attn_mask=seen, **options).transpose(1, 2))
        return torch.cat(parts, dim=1), None
    from torch.nn.attention.varlen import varlen_attn

    options["window_size"] = (-1, 0)  # causal, the last query and key together
    known = inspect.signature(varlen_attn).parameters  # before torch 2.12, groups of heads are no option
    options = {name: value for name, value in options.items() if name in known}
    found: Any = varlen_attn(q, k, v, queries, keys, most_queries, most_keys, **options)
    return found[None], None


@contextlib.contextmanager
def trl_trainer(setup: Setup, rollouts: Rollouts, flash3: bool) -> Iterator[Any]:
    """TRL's trainer, which is given the model in the place of loading one, and finds all batches in its queue."""
    import datasets
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    def loaded(*args: Any, **kwargs: Any) -> Any:
        setup.model.set_attn_implementation(TREE_ATTENTION)
        return setup.model

    def queued(**kwargs: Any) -> Any:  # its thread never ends, and would keep a trainer whose version it asks for
        return dataset(**kwargs | {"model_version_fn": lambda: 0})

    dataset = async_grpo_trainer.RolloutQueueDataset
    replaced: dict[str, Any] = {"create_model_from_path": loaded, "RolloutQueueDataset": queued}
    if setup.model.device.type == "cpu":
        replaced["get_peak_flops_per_device"] = lambda *args: None  # asks for the name of a GPU
    steps = setup.task.steps
    # All rows a step, whatever their tokens, and weights that are never sent.
    own: dict[str, Any] = {"token_budget": -1, "weight_sync_steps": steps + 1, "dtype": setup.task.dtype}
    source: Any = Recorded([*rollouts.samples()] * (steps + 2))  # some are fetched ahead
    more: dict[str, Any] = {"train_dataset": datasets.Dataset.from_list([{"prompt": "prompt"}]), **setup.trl}
    with mock.patch.multiple(async_grpo_trainer, **replaced):
        args = AsyncGRPOConfig(**setup.arguments, **own)
        trainer = AsyncGRPOTrainer("recorded", args=args, rollout_worker=source, weight_transfer=source, **more)
        if not flash3:
            AttentionInterface.register(TREE_ATTENTION, tree_attention)
        yield trainer


@contextlib.contextmanager
def our_trainer(setup: Setup, rollouts: Rollouts, provider: str) -> Iterator[Any]:
    """Our trainer from the completions on, with all shared levels, one as where layers have a state, or none."""
    import datasets

    from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer

    class Completed(LigerGRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            return self._known(rollouts.padded(self.accelerator.device))  # as after a generation

    def packed(batch: Any, share: bool, most: Any, agreed: Any, one_level: bool, *rest: Any) -> Any:
        return made(batch, share, most, agreed, one_level or provider == ONE_LEVEL, *rest)

    made = packing.packed_rows
    own: dict[str, Any] = {"num_generations": setup.task.batch, "share_prompt": provider != UNSHARED}
    args = LigerGRPOConfig(**setup.arguments, **own, loss_type="dapo", beta=0.0)  # as TRL's asynchronous one
    more: dict[str, Any] = {
        "train_dataset": datasets.Dataset.from_list([{"prompt": "prompt"}] * setup.task.samples),
        **setup.trl,
    }
    with mock.patch.object(packing, "packed_rows", packed):
        yield Completed(setup.model, lambda **_: [], args=args, **more)


class Measured(NamedTuple):
    """Tokens that a step runs on, seconds of the median step, peak memory, and the loss of the first step."""

    tokens: int
    seconds: float
    gibibytes: float | None
    loss: float


def measure(provider: str, task: Task, rollouts: Rollouts, device: torch.device, flash3: bool = False) -> Measured:
    """Trains a few steps.

    Raises:
        ImportError: without TRL, or what it asks for.
        RuntimeError: for a lack of memory, among others.
    """
    torch.manual_seed(0)  # the same weights for each
    with device:
        config = model_config(MODELS[task.model], task.layers)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, task.dtype))
    steps = Steps(device, task.warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(task, device, folder) | {"lr_scheduler_type": "constant"}
        setup = Setup(task, model, arguments | {"bf16": task.dtype == "bfloat16"}, [steps])
        built = trl_trainer(setup, rollouts, flash3) if provider == TRL else our_trainer(setup, rollouts, provider)
        with contextlib.redirect_stdout(sys.stderr), built as trainer:
            trainer.train()
    first = trainer.state.log_history[0]
    tokens = first.get("batch/forwarded_tokens_per_step") or trainer._packing.executed // task.steps
    memory = None if device.type == "cpu" else steps.peak() / 2**30
    return Measured(int(tokens), statistics.median(steps.seconds()[task.warmup :]), memory, first["loss"])


def _chosen(text: str, known: tuple[str, ...], what: str) -> list[str]:
    return [closest(name, known, what) for name in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b", help="whose sizes are taken")
    parser.add_argument("--layers", type=int, default=0, help="how many of its layers; default: all")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; default: all weights are trained")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="default: %(default)s")
    parser.add_argument("--lengths", default="64:512", help="tokens of a completion or answer, the least and the most")
    sizes = {"groups": 4, "prompt": 512, "group": 8, "system": 512, "conversations": 2, "turns": 6, "result": 128}
    for name, default in {**sizes, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--flash3", action="store_true", help="let TRL fetch its flash attention from the Hub")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    options = parser.parse_args(argv)
    numbers = [getattr(options, name) for name in (*sizes, "steps")]
    if min(numbers) < 1 or options.layers < 0 or options.lora < 0:
        parser.error("sizes and `--steps` must be 1 or more, and `--layers` and `--lora` 0 or more")
    try:
        low, high = parse_lengths(options.lengths)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        parser.error(f"`--lengths` is {options.lengths!r}; give a range such as 64:512, or a number of tokens")
    try:
        device = Device(find_device(options.device))
        shapes = _chosen(options.shapes, SHAPES, "shape")
        providers = _chosen(options.providers, PROVIDERS, "provider")
    except BenchmarkError as error:
        parser.error(str(error))
    work: dict[str, Any] = {name: getattr(options, name) for name in ("model", "layers", "lora")}
    work |= {"dtype": "float32" if device.module is None else "bfloat16", "steps": WARMUP + options.steps}
    for shape in shapes:
        rollouts = Rollouts(shape, options, MODELS[options.model].vocab)
        count, tokens = len(rollouts.lengths), int(rollouts.lengths.sum())
        task = Task(trainer="grpo", batch=count, warmup=WARMUP, **work)
        title = (
            f"{shape} · {options.model} · {count} rows, {tokens:,} tokens · {device.name()}, torch {torch.__version__}"
        )
        table = make_table(title, "tokens run", "ms a step", "rows' tokens/s", "peak GiB", "first loss")
        for provider in providers:
            try:
                found = measure(provider, task, rollouts, device.device, options.flash3)
            except (ImportError, OSError, RuntimeError) as error:
                table.add_row(provider, *[""] * 5, explain(error))
            else:
                speed = milliseconds(found.seconds * 1e3), f"{tokens / found.seconds:,.0f}"
                table.add_row(
                    provider, f"{found.tokens:,}", *speed, number(found.gibibytes, ".1f"), f"{found.loss:.6f}"
                )
            device.collect()
        make_console().print(table)


if __name__ == "__main__":
    main()
