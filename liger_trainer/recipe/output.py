"""The end of a run and its folder: what is never overwritten, how a killed run continues, and the summary.

What a run was started with is kept beside its checkpoints, to tell what another start changes of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.markup import escape
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    pipeline,
    set_seed,
)

from liger_trainer.callbacks.memory import peak_memory
from liger_trainer.callbacks.run_report import REPORT
from liger_trainer.recipe.file import RecipeError, TrainingError, first_line
from liger_trainer.recipe.hosts import ending_together
from liger_trainer.recipe.load import Recipe
from liger_trainer.trainers.checkpoints.resuming import CheckpointError, common_checkpoint
from liger_trainer.trainers.checkpoints.whole import LOCK, CheckpointWriteError, out_of_room, owned, room_in

logger = logging.getLogger(__name__)

FILE = "recipe.json"

_KEPT = (  # keys with which another run would be trained
    *("trainer", "model_name_or_path", "model_config", "data_files", "dataset_name", "dataset_config"),
    *("columns", "roles", "prompt_template", "system_prompt", "max_length", "packing", "assistant_only_loss"),
    *("loss_type", "beta", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "optim", "learning_rate"),
    *("lr_scheduler_type", "seed", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "num_generations"),
)


class KeepRecipeCallback(TrainerCallback):
    """Writes the keys of a recipe into the folder of its run with each checkpoint."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the file on the main process."""
        if state.is_world_process_zero:
            text = json.dumps(self._values, indent=2) + "\n"
            (Path(str(args.output_dir)) / FILE).write_text(text, encoding="utf-8")


def values_of(recipe: Recipe) -> dict[str, Any]:
    """The keys of `recipe` with which another run would be trained, as JSON holds them."""
    owners = (recipe.recipe, recipe.data, recipe.model, recipe.training, recipe.more)
    values = {}
    for key in _KEPT:
        owner = next((owner for owner in owners if hasattr(owner, key)), None)
        if owner is not None:
            values[key] = getattr(owner, key)
    return json.loads(json.dumps(values, default=lambda value: str(getattr(value, "value", value))))


def check_continues(recipe: Recipe, checkpoint: str) -> None:
    """Says what `recipe` changes of the run that has saved `checkpoint`.

    Raises:
        RecipeError: if another trainer has saved it.
    """
    file = Path(checkpoint).parent / FILE
    if not file.is_file():
        return
    before, now = json.loads(file.read_text(encoding="utf-8")), values_of(recipe)
    theirs = before.get("trainer")
    if theirs != now["trainer"]:
        raise RecipeError(
            f"{recipe.source}: `trainer` is {now['trainer']!r}, but {checkpoint} is of `trainer: {theirs}`; start from "
            "its model (`model_name_or_path`) with another `output_dir`."
        )
    changed = [f"`{key}` {before.get(key)!r} → {value!r}" for key, value in now.items() if before.get(key) != value]
    if changed and PartialState().is_main_process:
        logger.warning("The run in %s goes on with other values: %s.", file.parent, ", ".join(changed))


@contextlib.contextmanager
def owned_folder(recipe: Recipe) -> Iterator[None]:
    """Creates ``output_dir`` if necessary, and keeps other runs from writing to it.

    A folder that it has created and that is still empty at the end, as after an error in the recipe, is removed.
    """
    folder = Path(str(recipe.training.output_dir))
    created = False
    with ending_together():
        try:
            if folder.exists() and not folder.is_dir():
                raise RecipeError(f"`output_dir` is {str(folder)!r}, which is a file; give a folder.")
            created = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        except RecipeError:
            raise
        except (OSError, ValueError) as error:  # a name too long, no permission; a NUL in the name
            raise RecipeError(
                f"`output_dir` {str(folder)!r} cannot be created: {getattr(error, 'strerror', error)}; give another "
                "one."
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RecipeError(f"`output_dir` {str(folder)!r} cannot be written to; give another one.")
    with contextlib.ExitStack() as held:
        if any(gather_object([created])):  # the last to try is the one that has the lock
            held.callback(_remove_empty, folder)
        try:
            held.enter_context(owned(folder))
        except BlockingIOError as error:
            raise RecipeError(f"`output_dir`: {error}. Wait for it, end it, or give another `--output_dir`.") from error
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty, or another process has removed it
        folder.rmdir()


def prepare_output_dir(recipe: Recipe) -> str | None:
    """Finds the checkpoint to resume from, and refuses a folder with other files.

    Returns:
        The checkpoint to resume from, or None to start from the beginning. ``resume_from_checkpoint: true`` takes the
        last complete checkpoint in ``output_dir``, or None if there is none yet.
    """
    state = PartialState()
    folder = Path(str(recipe.training.output_dir))
    asked: Any = recipe.training.resume_from_checkpoint
    asked = {"true": True, "false": None, "": None}.get(str(asked).lower(), asked)
    if asked is not None:
        return _resume(asked, folder)
    with ending_together():  # and no process writes before all have looked
        holds = folder.exists() and any(path.name != LOCK for path in folder.iterdir())
        if holds and not recipe.recipe.overwrite_output_dir:
            raise RecipeError(
                f"`output_dir` {str(folder)!r} is not empty, and nothing in it is overwritten. Add "
                "`--resume_from_checkpoint true` to continue the run in it, `--output_dir` with another folder, or "
                "`--overwrite_output_dir true` to delete its checkpoints and start again."
            )
    if state.is_local_main_process:  # hosts that share the folder help each other
        for path in folder.glob("checkpoint-*"):
            if re.fullmatch(r"checkpoint-\d+", path.name):
                shutil.rmtree(path, ignore_errors=True)
    state.wait_for_everyone()
    return None


def _resume(asked: str | Literal[True], folder: Path) -> str | None:
    if asked is True:
        try:
            found = common_checkpoint(folder)
        except CheckpointError as error:
            raise RecipeError(str(error)) from error
        if found is None:
            logger.warning("There is no complete checkpoint in %s yet; the run starts from the beginning.", folder)
            return None
        logger.warning("Resuming from %s.", found)
        return str(found)
    with ending_together():
        if not (Path(asked) / "trainer_state.json").is_file():
            raise RecipeError(
                f"`resume_from_checkpoint` is {asked!r}, which is not a checkpoint (it has no trainer_state.json). "
                "Give one, or true for the last one in `output_dir`."
            )
    return asked


@contextlib.contextmanager
def room_for(folder: str) -> Iterator[None]:
    """Reports a full disk, in code that writes to `folder`, as one error that says how to continue."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        if not out_of_room(error):
            raise
        room = (
            "" if isinstance(error, CheckpointWriteError) else f" `output_dir` is {folder!r}: {room_in(Path(folder))}."
        )
        raise TrainingError(
            f"Writing failed: {first_line(error)}{room} With more room, `--resume_from_checkpoint true` continues from "
            "the last complete checkpoint; with another `--output_dir`, its path does."
        ) from error


MEASURES = {  # keys that TRL's trainers log, with their names in the summary
    "reward": "mean reward",
    "rewards/accuracies": "preference acc.",
    "accuracy": "preference acc.",
    "rewards/margins": "reward margin",
}


def summarize(recipe: Recipe, trainer: Trainer, metrics: Mapping[str, float], converses: bool) -> None:
    """Prints the summary of a finished run and draws its loss curve; call it on the main process."""
    folder = Path(str(recipe.training.output_dir))
    history = trainer.state.log_history
    console = Console(width=120 if not sys.stdout.isatty() else None, highlight=False)
    console.print("\n[bold]Result[/bold]")
    for name, value in summary_lines(history, metrics, trainer.args.device.type):
        console.print(f"  {name:<16} {escape(value)}")
    if recipe.recipe.loss_curve:
        curve = draw_loss_curve(history, folder / "loss_curve.png")
        if curve is not None:
            console.print(f"  {'loss curve':<16} {escape(str(curve))}", soft_wrap=True)
    if (folder / REPORT).is_file():
        console.print(f"  {'report':<16} {escape(str(folder / REPORT))}", soft_wrap=True)
    console.print(f"  {'saved model':<16} {escape(str(folder))}", soft_wrap=True)
    for prompt, text in continuations(recipe, folder, converses):
        console.print(f"\n[bold]{escape(prompt)}[/bold]{escape(text)}")


def summary_lines(history: list[dict[str, Any]], metrics: Mapping[str, float], device: str) -> list[tuple[str, str]]:
    """Name and value of each line of the summary, from the Trainer's log and final metrics."""
    losses = _values(history, "loss")
    lines = [("steps", str(history[-1]["step"] if history else 0))]
    if any(abs(loss) >= 5e-4 for loss in losses):  # a policy's is 0 while it trains on what it has just written
        lines.append(("training loss", f"{losses[0]:.3f} → {losses[-1]:.3f}"))
    evaluations = _values(history, "eval_loss")
    if any(abs(loss) >= 5e-4 for loss in evaluations):
        first = f"{evaluations[0]:.3f} → " if len(evaluations) > 1 else ""
        lines.append(("evaluation loss", f"{first}{evaluations[-1]:.3f}"))
    lines += measured(history)
    if metrics.get("train_runtime"):
        lines.append(("time", f"{metrics['train_runtime']:.0f} s"))
    for key, name, form in (("tokens_per_second", "tokens/s", ",.0f"), ("mfu", "MFU", ".1%")):
        values = [value for value in _values(history, key) if value]
        if values:
            lines.append((name, f"{statistics.median_high(values):{form}}"))
    memory = max(_values(history, "peak_memory_gib"), default=0.0) or peak_memory(torch.device("cpu")) / 2**30
    lines.append(("peak memory", f"{memory:.2f} GiB ({'of the process' if device == 'cpu' else device})"))
    return lines


def _values(history: list[dict[str, Any]], key: str) -> list[float]:
    """The values logged as `key`, without None, which the Trainer logs for values that are not finite."""
    return [entry[key] for entry in history if entry.get(key) is not None]


def measured(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """First and last value of each alignment measure, in evaluations or, with fewer than two, in training logs."""
    lines = []
    for key, name in MEASURES.items():
        values = _values(history, f"eval_{key}")
        where = "evaluation"
        if len(values) < 2:
            values, where = _values(history, key), "training"
        if values:
            lines.append((name, f"{values[0]:.3f} → {values[-1]:.3f} ({where})"))
    return lines


def draw_loss_curve(history: list[dict[str, Any]], path: Path) -> Path | None:
    """Draws the loss and the measures of the summary over steps into `path`; returns None if nothing was logged."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {key: name for key, name in {"loss": "loss", **MEASURES}.items() if _values(history, key)}
    if not drawn:
        return None
    figure, rows = plt.subplots(len(drawn), figsize=(7, 4 * len(drawn)), squeeze=False)
    for axes, (key, name) in zip(rows[:, 0], drawn.items(), strict=True):
        for logged, label, style in ((key, "training", ".-"), (f"eval_{key}", "evaluation", "o--")):
            points = [(entry["step"], entry[logged]) for entry in history if entry.get(logged) is not None]
            if points:
                axes.plot(*zip(*points), style, label=label, markersize=4)
        axes.set(xlabel="step", ylabel=name, title=name.capitalize())
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def continuations(recipe: Recipe, folder: Path, converses: bool) -> list[tuple[str, str]]:
    """``sample_prompts``, each with its continuation by the model loaded from `folder`.

    Where the model `converses`, a prompt is the user's turn, and the chat template writes it.
    """
    prompts, asked = recipe.recipe.sample_prompts, asked_of(recipe, converses)
    if not prompts:
        return []
    set_seed(recipe.training.seed)
    generate: Any = pipeline(
        "text-generation",
        model=AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        device=recipe.training.device,
    )
    options = {"max_new_tokens": recipe.recipe.sample_tokens, "do_sample": True, "temperature": 0.7, "top_k": 40}
    answers = (generate(each, return_full_text=False, **options) for each in asked)
    return [(prompt, answer[0]["generated_text"]) for prompt, answer in zip(prompts, answers, strict=True)]


def asked_of(recipe: Recipe, converses: bool) -> list[Any]:
    """``sample_prompts`` as the model gets them: plain text or, where it `converses`, turns for its chat template."""
    prompts, system = recipe.recipe.sample_prompts or [], recipe.recipe.system_prompt
    first = [{"role": "system", "content": system}] if system else []
    return [[*first, {"role": "user", "content": prompt}] for prompt in prompts] if converses else prompts
