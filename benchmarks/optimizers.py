"""What optimizers make of bf16 weights: a small Llama is fine-tuned with each of them, and with fp32 weights.

    python -m liger_trainer.benchmarks.optimizers --output results            # minutes on a GPU
    python -m liger_trainer.benchmarks.optimizers --output results --small    # the CPU, 2 minutes
    python -m liger_trainer.benchmarks.optimizers --plot results/optimizers.csv

The corpus is Python's standard library, one token a byte, split by file into pretraining, fine-tuning and held-out
text. The model is pretrained in fp32, and rounded to bf16 once: what a published checkpoint holds, and where every run
starts. Then follow, at the constant learning rates that the recipes begin with, without weight decay:

    SFT   the next-token loss at 1e-5, on text in which upper and lower case are exchanged
    DPO   beta 0.1 at 5e-7: the second half of each row is preferred to itself with typos, neighbours exchanged

Runs of one seed see the same rows in the same order; seeds differ in the order only. Every forward is in bf16: with
fp32 weights under autocast, with bf16 weights as they are. What is measured on held-out text is computed in fp32 for
all, of the weights in bf16, which are what the matmuls of a bf16 forward see of fp32 weights too. At the end the loss
is also measured of the weights as they are trained, with what bf16 lacks: all start at a bf16 value, so after few small
steps most have not come half of the way to the next, and their bf16 values lag behind.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from liger_trainer.benchmarks.evidence.results import Evidence, Value
from liger_trainer.benchmarks.measure import explain
from liger_trainer.benchmarks.plots import draw_if_installed, draw_optimizers
from liger_trainer.benchmarks.report import make_console, make_table, number
from liger_trainer.benchmarks.small_llama import (
    Sizes,
    build,
    command,
    corpus,
    cut,
    log_probs,
    log_probs_of_all,
    pretrain,
)
from liger_trainer.optim import LigerAdamW

FP32 = "AdamW, fp32 weights"  # what the others are compared with
_BETA = 0.1
_TYPOS = 0.2  # share of the pairs of neighbours that are exchanged
_MEASURED = 6  # how often a run is measured, besides at its start

# Rows are pairs for DPO, so its batches have half as many.
LARGE = Sizes(hidden=512, layers=6, rows=32, length=512, pretraining=1500, steps=300, held_out=4, seeds=3)
SMALL = Sizes(hidden=256, layers=2, rows=4, length=64, pretraining=100, steps=40, held_out=2, seeds=1)


@dataclasses.dataclass(frozen=True)
class Task:
    """A fine-tuning.

    Attributes:
        rows: Tokens of all runs, (N, k, length + 1) in uint8, k = 1, or 2 for a pair; `held_out` as well.
        metrics: Makes the loss, and what else is measured, from the tokens' log-probabilities (n, k, length), and from
            those of the start.
    """

    name: str
    lr: float
    batch: int
    rows: Tensor
    held_out: Tensor
    metrics: Callable[[Tensor, Tensor], dict[str, Tensor]]


def _sft(log_probs: Tensor, start: Tensor) -> dict[str, Tensor]:
    return {"loss": -log_probs.mean()}


def _dpo(log_probs: Tensor, start: Tensor) -> dict[str, Tensor]:
    answer = slice(log_probs.shape[-1] // 2, None)
    chosen, rejected = (_BETA * (log_probs - start)[..., answer].sum(-1)).unbind(1)
    margin = chosen - rejected
    accuracy = (margin > 0).float().mean()
    return {"loss": -F.logsigmoid(margin).mean(), "accuracy": accuracy, "margin": margin.mean()}


def _pairs(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Rows (n, length + 1) and the same with typos in their second half, (n, 2, length + 1)."""
    first = rows.shape[1] // 2 + 1
    answers = rows[:, first : first + (rows.shape[1] - first) // 2 * 2].unflatten(1, (-1, 2))
    exchanged = torch.rand(answers.shape[:2], generator=generator).lt(_TYPOS).unsqueeze(-1)
    rejected = rows.clone()
    rejected[:, first : first + answers[0].numel()] = torch.where(exchanged, answers.flip(-1), answers).flatten(1)
    return torch.stack((rows, rejected), dim=1)


def tasks(text: dict[str, bytes], sizes: Sizes, device: torch.device) -> list[Task]:
    """Both fine-tunings."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, lr, batch, metrics in (("SFT", 1e-5, sizes.rows, _sft), ("DPO", 5e-7, sizes.rows // 2, _dpo)):
        parts = []
        for part, batches in (("fine-tuning", sizes.steps), ("held-out", sizes.held_out)):
            source = text[part].swapcase() if name == "SFT" else text[part]
            rows = cut(source, batches * batch, sizes.length, generator)
            parts.append((rows.unsqueeze(1) if name == "SFT" else _pairs(rows, generator)).to(device))
        found.append(Task(name, lr, batch, parts[0], parts[1], metrics))
    return found


def pretrained(text: bytes, sizes: Sizes, device: torch.device) -> tuple[list[Tensor], float]:
    """The weights from which all runs start, bf16 values in fp32, and the loss of the last batch."""
    model = build(sizes, torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    rows = cut(text, sizes.pretraining * sizes.rows, sizes.length, generator).unsqueeze(1).to(device)
    losses = pretrain(model, rows, sizes.rows, lr=1e-3)
    return [weight.detach().bfloat16().float() for weight in model.parameters()], losses[-1].item()


def _torch(parameters: Iterable[Tensor], lr: float, seed: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr, weight_decay=0.0, fused=True)


def _liger(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters, lr, seed: LigerAdamW(parameters, lr, weight_decay=0.0, seed=seed, **options)


def torchao_8bit(parameters: Iterable[Tensor], lr: float, seed: int = 0) -> torch.optim.Optimizer:
    """The 8-bit AdamW of torchao, with stochastic rounding."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr, weight_decay=0.0, bf16_stochastic_round=True)


def bitsandbytes_8bit(parameters: Iterable[Tensor], lr: float, seed: int = 0) -> torch.optim.Optimizer:
    """The 8-bit AdamW of bitsandbytes."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr, weight_decay=0.0)


OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[..., torch.optim.Optimizer]]] = {
    FP32: (torch.float32, _torch),
    "AdamW, bf16 weights": (torch.bfloat16, _torch),
    "bitsandbytes AdamW8bit": (torch.bfloat16, bitsandbytes_8bit),
    "torchao AdamW8bit, stochastic": (torch.bfloat16, torchao_8bit),
    "LigerAdamW, 8bit, stochastic": (torch.bfloat16, _liger(states="8bit", master="stochastic")),
    "LigerAdamW, 8bit": (torch.bfloat16, _liger(states="8bit")),
    "LigerAdamW, bf16": (torch.bfloat16, _liger(states="bf16")),
    "LigerAdamW, fp32": (torch.bfloat16, _liger(states="fp32")),
}


def _in_bf16(model: torch.nn.Module) -> Iterator[Tensor]:
    return (weight.detach().bfloat16() for weight in model.parameters())


def _flat(weights: Iterable[Tensor]) -> Tensor:
    return torch.cat([weight.detach().flatten().float() for weight in weights])


class Bench:
    """The models that all runs share, with the weights they start from."""

    def __init__(self, sizes: Sizes, start: Sequence[Tensor], device: torch.device) -> None:
        self.sizes, self.start, self.device = sizes, start, device
        self.models = {dtype: build(sizes, dtype, device) for dtype in (torch.float32, torch.bfloat16)}
        self.measuring = build(sizes, torch.float32, device)
        self._starts: dict[Any, Tensor] = {}

    def run(self, task: Task, name: str, seed: int) -> tuple[dict[int, dict[str, Tensor]], Tensor]:
        """One fine-tuning; returns what was measured by steps and, flat and in fp32, the weights that it trained."""
        dtype, optimizer_of = OPTIMIZERS[name]
        model = self.models[dtype]
        self._copy(self.start, model)
        at_start = self._at_start(task, "rows", model)
        held_out_at_start = self._at_start(task, "held_out", self.measuring)
        torch.manual_seed(seed)
        optimizer = optimizer_of(model.parameters(), task.lr, seed)
        order = torch.randperm(len(task.rows), generator=torch.Generator().manual_seed(seed)).to(self.device)
        steps = order.split(task.batch)
        measured = {len(steps) * part // _MEASURED for part in range(_MEASURED + 1)}
        found = {0: self._measure(task, _in_bf16(model), held_out_at_start)}
        for step, rows in enumerate(steps, 1):
            task.metrics(log_probs(model, task.rows[rows]), at_start[rows])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in measured:
                found[step] = self._measure(task, _in_bf16(model), held_out_at_start)
        trained = [weight.detach().float() for weight in model.parameters()]
        if isinstance(optimizer, LigerAdamW):
            trained = [optimizer.fp32_weight(weight) for weight in model.parameters()]
        start, weights = _flat(self.start), _flat(trained)
        found[len(steps)] |= {
            "changed": _flat(model.parameters()).bfloat16().ne(start).float().mean(),
            "changed_fp32": weights.ne(start).float().mean(),
            "trained_loss": self._measure(task, trained, held_out_at_start)["loss"],
        }
        return found, weights

    @torch.no_grad()
    def _copy(self, weights: Iterable[Tensor], model: torch.nn.Module) -> None:
        for target, weight in zip(model.parameters(), weights):
            target.copy_(weight)

    def _at_start(self, task: Task, name: str, model: torch.nn.Module) -> Tensor:
        """What a model says at the start; the reference of DPO."""
        key = (task.name, name, model)
        if key not in self._starts:
            self._copy(self.start, model)
            autocast = model is not self.measuring
            self._starts[key] = log_probs_of_all(model, getattr(task, name), task.batch, autocast)
        return self._starts[key]

    @torch.no_grad()
    def _measure(self, task: Task, weights: Iterable[Tensor], at_start: Tensor) -> dict[str, Tensor]:
        self._copy(weights, self.measuring)
        return task.metrics(log_probs_of_all(self.measuring, task.held_out, task.batch, False), at_start)


def compare(
    sizes: Sizes, device: torch.device, begun: Evidence, tell: Callable[[str], object] = print
) -> Iterator[Evidence]:
    """Runs both tasks with every optimizer that is installed, for each seed.

    Args:
        sizes: Sizes of the model and the runs.
        device: Where.
        begun: The setting.
        tell: Gets a line on each optimizer, and on each that is left out.

    Yields:
        After each optimizer, the values of all runs so far.
    """
    begin, text = time.perf_counter(), corpus()
    start, loss = pretrained(text["pretraining"], sizes, device)
    bench, values = Bench(sizes, start, device), begun.values
    count = sum(weight.numel() for weight in start)
    tell(f"{count / 1e6:.1f} M parameters, pretrained to {loss:.3f} in {time.perf_counter() - begin:.0f} s")
    with torch.no_grad():
        before = _flat(start)
    for task in tasks(text, sizes, device):
        aims: list[Tensor] = []
        for name in OPTIMIZERS:
            begin = time.perf_counter()
            try:
                runs = [bench.run(task, name, seed) for seed in range(sizes.seeds)]
            except Exception as error:
                if name == FP32 or name.startswith("Liger"):
                    raise
                tell(f"{task.name}, {name}: {explain(error)}")
                continue
            if name == FP32:
                aims = [trained for _, trained in runs]
            for seed, (found, trained) in enumerate(runs):
                other = (seed + 1) % sizes.seeds if name == FP32 else seed
                away, moved = trained - aims[other], aims[seed] - before
                found[sizes.steps] |= {
                    "distance": away.norm() / moved.norm(),
                    "largest_distance": away.abs().max() / moved.abs().max(),
                }
                values = [*values, *_values(task.name, name, seed, found)]
            tell(f"{task.name}, {name}: {time.perf_counter() - begin:.0f} s")
            yield Evidence(values)


# After the last step, `changed` is the share of the weights that differ from the start in bf16, `changed_fp32` that of
# the trained weights, with what their bf16 values lack, and `trained_loss` their held-out loss. `distance` is how far
# they are from the trained weights of fp32 weights, by how far those are from the start; `largest_distance` is the same
# with the largest difference of a weight in place of the norm.
def _values(task: str, name: str, seed: int, found: dict[int, dict[str, Tensor]]) -> Iterator[Value]:
    for step, measures in found.items():
        for measure, value in measures.items():
            yield Value(name, seed, f"{task} {measure}", step, value.item())


def _spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def summary(found: Evidence, task: str) -> Table:
    """A row per optimizer: means over the seeds at the end of a task, with their standard deviations.

    `over fp32` is the held-out loss less that of fp32 weights and the same seed; `gain` is how much the loss
    fell, by how much it fell with fp32 weights, both in the mean: of the weights in bf16, and as they are trained.
    """

    def at_end(name: str, measure: str) -> list[float]:
        """Of each seed; empty if it was not measured."""
        series = (found.of(name, seed, f"{task} {measure}") for seed in found.seeds)
        return [values[-1] for values in series if values]

    losses = found.by_index(FP32, found.seeds[0], f"{task} loss")
    headings = ["held-out loss", "over fp32", "gain, %", "as trained, %", "accuracy, %", "margin", "changed, %"]
    headings += ["as trained, %", "distance, %", "largest, %"]
    title = f"{task}, {max(losses)} steps, from a loss of {losses[0]:.4f}"
    table = make_table(title, *headings, remark=False)
    fell: dict[str, list[float]] = {}
    for name in (name for name in found.variants if at_end(name, "loss")):
        fell[name] = [losses[0] - statistics.mean(at_end(name, measure)) for measure in ("loss", "trained_loss")]
        table.add_row(
            name,
            _spread(at_end(name, "loss"), ".4f"),
            _spread([loss - aim for loss, aim in zip(at_end(name, "loss"), at_end(FP32, "loss"))], "+.4f"),
            *(_percent([gain / aim] if aim > 0 else []) for gain, aim in zip(fell[name], fell[FP32])),
            _percent(at_end(name, "accuracy")),
            _spread(at_end(name, "margin"), ".4f"),
            *(
                _percent(at_end(name, measure))
                for measure in ("changed", "changed_fp32", "distance", "largest_distance")
            ),
        )
    return table


def _percent(shares: Sequence[float]) -> str:
    return number(100 * statistics.mean(shares) if shares else None, ".1f")


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    found, file = command("optimizers", __doc__, (LARGE, SMALL), argv, compare, resume=False)
    console = make_console()
    for task in dict.fromkeys(measure.split()[0] for measure in found.measures):
        console.print(summary(found, task))
    draw_if_installed(lambda image: draw_optimizers(found, image), file)


if __name__ == "__main__":
    main()
