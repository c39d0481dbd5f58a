"""One run of a comparison, in a process of its own: ``python -m liger_trainer.tools.comparing.side SIDE FOLDER``.

It trains, and writes into the work folder what it measured.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, set_seed

from liger_trainer.callbacks.labelled_share import token_masks
from liger_trainer.callbacks.memory import MemoryCallback
from liger_trainer.errors import UserError
from liger_trainer.recipe.build import build_trainer
from liger_trainer.recipe.data import load_data, load_tokenizer
from liger_trainer.recipe.experts import count_experts
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.load import Recipe, build_recipe, load_recipe
from liger_trainer.recipe.model import config_of_recipe
from liger_trainer.recipe.run import check_before_loading, train_recipe
from liger_trainer.tools.comparing.measures import Completions, compare_gradients, norm_of, save_gradients, split_sums
from liger_trainer.tools.comparing.request import WARM_START, Request, stock_recipe, values_of

STOCK, AGAIN, OURS = "stock", "stock_again", "ours"
SIDES = (STOCK, AGAIN, OURS)
"""The runs, in order: the stock trainer, the stock trainer with sums in another order, and ours."""


@dataclasses.dataclass
class Measured:
    """What a run leaves."""

    weights: str  # a digest of the weights that it started from
    loss: list[float]  # the loss of each step
    # The norm of each step's gradients before they are clipped, summed in fp32 whatever their dtype.
    grad_norm: list[float]
    tokens: list[int]  # tokens of each step, without padding
    seconds: list[float]  # time of each step, without generation
    peak_memory_gib: float  # peak memory of the accelerator or, on a CPU, of the process
    device: str  # where it ran
    # For each part of a layer, norm and difference of [`compare_gradients`]; empty for the stock run.
    gradients: dict[str, dict[str, float]]
    dropped: dict[str, Any]  # arguments of ours that the stock run does not have
    generated: int  # how often it asked for completions
    kernels: list[list[str]]  # patched parts, as rows of component, target, count and kernel; empty for the stock runs

    @classmethod
    def read(cls, work: Path, side: str) -> Measured:
        """Reads what a run has written."""
        return cls(**json.loads((work / f"{side}.json").read_text(encoding="utf-8")))


def main(arguments: Sequence[str]) -> int:
    """Runs a side, or the warm start before all of them, of the `Request` that is written in a folder.

    Returns:
        0, or 2 after an error that the user can correct, which is printed as one line.
    """
    side, folder = arguments
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    request = Request.read(Path(folder))
    try:
        if side == WARM_START:
            recipe = load_recipe(request.recipe, [*request.options, "--output_dir", str(request.work)], request.smoke)
            if recipe.warm_start is not None:
                train_recipe(recipe.warm_start)
        else:
            measured = run_side(request, side)
            text = json.dumps(dataclasses.asdict(measured), default=str)
            (request.work / f"{side}.json").write_text(text, encoding="utf-8")
    except UserError as error:
        print(f"liger-trainer: {error}", file=sys.stderr)
        return 2
    return 0


def run_side(request: Request, side: str) -> Measured:
    """Trains one side and measures it."""
    recipe, dropped = recipe_of(request, side)
    trainer = trainer_of(recipe)
    model: Any = trainer.model
    no_dropout(model)
    weights = digest(model)
    completions = Completions(request.work / "completions", record=side == STOCK)
    completions.install()
    if side == AGAIN:
        split_sums(model)
    recorder = Recorder(trainer, completions, request.work / "gradients", record=side == STOCK)
    trainer.train()
    device, history = trainer.args.device, [entry for entry in trainer.state.log_history if "loss" in entry]
    return Measured(
        weights=weights,
        loss=[math.nan if entry["loss"] is None else float(entry["loss"]) for entry in history],
        grad_norm=recorder.norms,
        tokens=recorder.tokens,
        seconds=recorder.seconds,
        peak_memory_gib=recorder.peak_memory_gib(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        gradients=recorder.gradients,
        dropped=dropped,
        generated=completions.calls,
        kernels=[
            [row.component, row.target, str(row.count), row.kernel or f"left alone: {row.reason}"]
            for row in getattr(trainer, "kernel_report", None) or ()
        ],
    )


def recipe_of(request: Request, side: str) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of a side, and the arguments of ours that it does not have."""
    values, source, _ = values_of(request)
    values = {**values, "output_dir": str(request.work / side)}
    if side != OURS:
        return stock_recipe(values, source)
    return build_recipe({**values, "kernel_report": False, "non_finite": "off"}, source), {}


def trainer_of(recipe: Recipe) -> Trainer:
    """Builds the trainer as ``train`` does, with our classes or the stock ones."""
    check_before_loading(recipe)
    if recipe.model.load_in_4bit and count_experts(config_of_recipe(recipe)):
        raise RecipeError(
            f"{recipe.source}: `load_in_4bit` is true for a mixture of experts, which the stock trainer cannot train; "
            "set it to false."
        )
    train, _ = load_data(recipe)
    set_seed(recipe.training.seed)
    tokenizer = load_tokenizer(recipe, train, None)
    return build_trainer(recipe, tokenizer, train, None, resumed=False)


def no_dropout(model: Any) -> None:
    """Switches dropout off; runs that compute in another order would drop different numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def digest(model: Any) -> str:
    """A digest of all weights, with their names."""
    found = hashlib.sha256()
    for name, each in model.named_parameters():
        found.update(name.encode())
        found.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


class Recorder:
    """Measures the steps of a trainer: their time, tokens, norms of gradients, and the gradients of the first.

    With `record`, these are saved in a folder; else they are compared with those saved. `completions` takes the time of
    generation.
    """

    def __init__(self, trainer: Trainer, completions: Any, folder: Path, record: bool) -> None:
        self.trainer, self.completions, self.folder, self.record = trainer, completions, folder, record
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.norms: list[float] = []
        self.gradients: dict[str, dict[str, float]] = {}
        self._began = 0.0
        self._pending: list[torch.Tensor] = []  # tokens of the step so far; counting does not wait for the device
        recorder = self

        class Clock(TrainerCallback):
            """Calls the recorder at the borders of a step."""

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                recorder._began = recorder._now()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                recorder._look_at_gradients()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                recorder._end()

        trainer.add_callback(Clock())
        self._wrap(trainer)

    def _wrap(self, trainer: Any) -> None:
        """Sees each batch before its loss, and the gradients before they are clipped."""
        loss, clip = trainer.compute_loss, trainer.accelerator.clip_grad_norm_

        @functools.wraps(loss)
        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._count(inputs)
            return loss(model, inputs, *args, **kwargs)

        @functools.wraps(clip)
        def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
            self._look_at_gradients()
            return clip(*args, **kwargs)

        trainer.compute_loss = compute_loss
        trainer.accelerator.clip_grad_norm_ = clip_grad_norm

    def peak_memory_gib(self) -> float:
        """The most memory so far."""
        return MemoryCallback().metrics(self.trainer.args, self.trainer.state)["peak_memory_gib"]

    def _end(self) -> None:
        self.seconds.append(self._now() - self._began)
        self.tokens.append(sum(map(int, self._pending)))
        self._pending.clear()

    def _now(self) -> float:
        if self.trainer.args.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - self.completions.seconds

    def _count(self, inputs: Any) -> None:
        self._pending += [tokens.sum() for tokens, _ in token_masks(inputs)]

    def _look_at_gradients(self) -> None:
        """Once a step: when the gradients are clipped or, where they are not, before the optimizer's step."""
        if len(self.norms) > len(self.tokens):
            return
        before, model = self._now(), cast("nn.Module", self.trainer.model)
        if not self.norms and self.record:
            save_gradients(model, self.folder)
        elif not self.norms:
            self.gradients = compare_gradients(model, self.folder)
        scaler = self.trainer.accelerator.scaler  # of fp16, which has not divided by its scale yet
        self.norms.append(norm_of(model) / (scaler.get_scale() if scaler is not None else 1.0))
        self._began += self._now() - before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
