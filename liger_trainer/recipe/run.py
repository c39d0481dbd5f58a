"""Runs a recipe: data, tokenizer, model, trainer, training, evaluation, and the summary at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from jinja2 import TemplateError
from transformers import Trainer, set_seed

from liger_trainer.callbacks.non_finite import NonFiniteError
from liger_trainer.callbacks.stop_on_signal import stopping_on_signals
from liger_trainer.recipe.build import build_trainer
from liger_trainer.recipe.checks import check_generation, check_schedule, check_trackers
from liger_trainer.recipe.columns import holds_turns
from liger_trainer.recipe.data import load_data, load_tokenizer
from liger_trainer.recipe.file import RecipeError, TrainingError, first_line
from liger_trainer.recipe.hosts import check_same_recipe, check_shared, ending_together
from liger_trainer.recipe.load import Recipe
from liger_trainer.recipe.model import check_model
from liger_trainer.recipe.output import (
    KeepRecipeCallback,
    asked_of,
    check_continues,
    owned_folder,
    prepare_output_dir,
    room_for,
    summarize,
    values_of,
)
from liger_trainer.recipe.rewards import check_reward_models
from liger_trainer.trainers.checkpoints.resuming import CheckpointError
from liger_trainer.trainers.checks.trl_arguments import RewardError
from liger_trainer.trainers.moe import RouterLogitsError
from liger_trainer.trainers.reference import WrongReferenceError
from liger_trainer.trainers.samples import SamplesCallback
from liger_trainer.trainers.step import BatchError

logger = logging.getLogger(__name__)


def run_recipe(recipe: Recipe) -> Trainer:
    """Trains `recipe`, writes model, tokenizer, log and loss curve to ``output_dir``, and prints a summary.

    Returns:
        The trainer, after training.

    Raises:
        RecipeError: for a mistake in the recipe or its data that is found before training starts, and for a full disk.
        NonFiniteError: if `non_finite` has stopped the training.
        StoppedBySignal: if SIGTERM or SIGHUP has.
    """
    check_same_recipe(recipe)
    with owned_folder(recipe), room_for(str(recipe.training.output_dir)):
        check_shared(recipe)
        trainer, metrics, converses = train_recipe(recipe)
        if trainer.is_world_process_zero():
            summarize(recipe, trainer, metrics, converses)
    return trainer


def train_recipe(recipe: Recipe) -> tuple[Trainer, dict[str, float], bool]:
    """[`run_recipe`] without its summary.

    Returns:
        The trainer, the metrics of training and of the last evaluation, and whether the data are conversations.
    """
    with ending_together():
        check_before_loading(recipe)
    checkpoint = prepare_output_dir(recipe)
    if checkpoint is not None:
        with ending_together():
            check_continues(recipe, checkpoint)
    values = values_of(recipe)
    train, evaluation = load_data(recipe)
    converses = holds_turns(next(iter(train)))
    if recipe.warm_start is not None:
        recipe = _after_warm_start(recipe, recipe.warm_start, resumed=checkpoint is not None)
    set_seed(recipe.training.seed)
    tokenizer = load_tokenizer(recipe, train, checkpoint)
    trainer = build_trainer(recipe, tokenizer, train, evaluation, resumed=checkpoint is not None)
    trainer.add_callback(KeepRecipeCallback(values))
    if recipe.recipe.sample_steps is not None:
        trainer.add_callback(_samples(recipe, trainer, converses))
    with _training_errors(recipe, trainer):
        with stopping_on_signals(trainer):
            metrics = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
        _check_not_stopped(trainer)
        _check_began(recipe, trainer)
        if evaluation is not None:
            metrics.update(last_evaluation(trainer) or trainer.evaluate())
    _save(trainer, metrics)
    return trainer, metrics, converses


def _samples(recipe: Recipe, trainer: Trainer, converses: bool) -> SamplesCallback:
    prompts, settings = asked_of(recipe, converses), recipe.recipe
    try:
        return SamplesCallback(trainer, prompts, settings.sample_steps or 1, settings.sample_tokens)
    except (ValueError, TemplateError) as error:
        raise RecipeError(f"{recipe.source}: `sample_steps`: {first_line(error)}") from error


def check_before_loading(recipe: Recipe) -> None:
    """Checks everything that needs neither the data nor the weights."""
    args = recipe.training
    if args.n_gpu > 1:
        raise RecipeError(
            f"One process sees {args.n_gpu} GPUs, which would run `nn.DataParallel`; start one process per GPU with "
            "`accelerate launch --multi_gpu` or `liger-trainer train --accelerate_config ddp`, or set "
            "CUDA_VISIBLE_DEVICES=0."
        )
    check_trackers(args, recipe.source)
    check_schedule(args, recipe.source)
    check_generation(args, recipe.source)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size < started:
        raise RecipeError(
            f"{started} processes were started, but on this device ({args.device}) each would train the whole recipe "
            "on its own; start one, or set `use_cpu: true`."
        )
    check_model(recipe)
    check_reward_models(recipe.more)


def _after_warm_start(recipe: Recipe, warm_start: Recipe, resumed: bool) -> Recipe:
    """`recipe` with the model that its warm start has trained; a resumed run uses the one it started with."""
    folder = str(warm_start.training.output_dir)
    if not resumed:
        logger.warning("The warm start: `trainer: sft` on %s.", warm_start.data.dataset_name or "its data")
        warm_start.recipe.overwrite_output_dir = True  # an earlier attempt may have left it unfinished
        arguments: Any = warm_start.training
        arguments.kernel_report = False  # the recipe's own report follows
        train_recipe(warm_start)
        PartialState().wait_for_everyone()  # one process writes what all of them load
    elif not Path(folder).is_dir():
        raise RecipeError(f"The model of the warm start is no longer in {folder!r}; start the run again.")
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, model_name_or_path=folder, model_revision="main"),
        recipe=dataclasses.replace(
            recipe.recipe, model_config=None, tokenizer_name_or_path=None, tokenizer_vocab_size=None
        ),
    )


@contextlib.contextmanager
def _training_errors(recipe: Recipe, trainer: Trainer) -> Iterator[None]:
    """Turns errors of training that the user can correct into recipe errors, and ends the progress bar."""
    try:
        yield
    except CheckpointError as error:
        raise RecipeError(str(error)) from error
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise RecipeError(f"{recipe.source}: {error.args[0]}") from error
    except BatchError as error:
        raise TrainingError(f"The data: {first_line(error)}") from error
    except (RouterLogitsError, WrongReferenceError) as error:
        raise RecipeError(f"{recipe.source}: {first_line(error)}") from error
    except RewardError as error:
        raise TrainingError(first_line(error)) from error
    except Exception as error:
        tracker = type(error).__module__.partition(".")[0]
        if tracker not in (recipe.training.report_to or ()):
            raise
        raise RecipeError(f"{recipe.source}: `report_to`: {tracker}: {first_line(error)}") from error
    finally:
        for callback in trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.close()  # if an error left it open, it would be drawn again below the message


def _save(trainer: Trainer, metrics: dict[str, float]) -> None:
    trainer.save_model(trainer.args.output_dir)
    trainer.save_state()
    trainer.save_metrics("all", metrics, combined=False)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


def _check_not_stopped(trainer: Any) -> None:
    """Refuses to finish a training that `non_finite` has stopped."""
    if trainer._guard is not None and trainer._guard.stopped:
        step = trainer.state.global_step
        folder = Path(str(trainer.args.output_dir), f"checkpoint-{step}")
        left = f"{str(folder)!r} holds the last good state" if folder.is_dir() else "no checkpoint was saved"
        raise NonFiniteError(f"stopped at step {step}, by `non_finite: stop`; {left}.")


def _check_began(recipe: Recipe, trainer: Trainer) -> None:
    """Refuses a training without a single step, which the Trainer accepts."""
    if trainer.state.global_step == 0:
        batch, dropped = trainer.args.per_device_train_batch_size, trainer.args.dataloader_drop_last
        raise RecipeError(
            f"{recipe.source}: the data does not fill one batch, so nothing was trained: `per_device_train_batch_size` "
            f"is {batch}, and `dataloader_drop_last` {str(dropped).lower()}. Give more rows, a smaller batch, or "
            "`dataloader_drop_last: false`."
        )


def last_evaluation(trainer: Trainer) -> dict[str, float]:
    """The metrics of an evaluation after the last step, if they are those of the saved model; else empty."""
    if trainer.args.load_best_model_at_end:
        return {}
    entries = (entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step)
    return next((dict(entry) for entry in entries if "eval_loss" in entry), {})
