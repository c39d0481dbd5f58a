"""Runs a recipe: data, tokenizer, model, trainer, training, evaluation, and the summary at the end."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import TemplateError

from liger_trainer.recipe import Recipe
from liger_trainer.recipe.build import (
    build_trainer,
    check_adapted,
    check_optimizer,
    check_prompts,
    check_targets,
    check_vocabulary,
    template_error,
)
from liger_trainer.recipe.checks import check_generation, check_schedule
from liger_trainer.recipe.data import load_data, load_tokenizer
from liger_trainer.recipe.experts import check_adapted_experts
from liger_trainer.recipe.file import RecipeError, TrainingError, accelerate_config, first_line
from liger_trainer.recipe.model import check_model, lora_advice
from liger_trainer.recipe.output import owned_folder, prepare_output_dir, room_for
from liger_trainer.recipe.rewards import check_reward_models

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


def run_recipe(recipe: Recipe) -> Trainer:
    """Trains what `recipe` says and leaves the model, the tokenizer, the log and the loss curve in ``output_dir``.

    Returns:
        The trainer, after training.

    Raises:
        RecipeError: for anything in the recipe or its data that is found wrong before training starts, and for a disk
            that is full.
        NonFiniteError: if `non_finite` has stopped the training.
        StoppedBySignal: if SIGTERM or SIGHUP has.
    """
    from liger_trainer.recipe.summary import summarize

    with owned_folder(recipe), room_for(str(recipe.training.output_dir)):
        trainer, metrics = train_recipe(recipe)
        if trainer.is_world_process_zero():
            summarize(recipe, trainer, metrics)
    return trainer


def train_recipe(recipe: Recipe) -> tuple[Trainer, dict[str, float]]:
    """[`run_recipe`] without its summary; the metrics are those of training and of the last evaluation."""
    from transformers import set_seed

    from liger_trainer.callbacks.stop_on_signal import stopping_on_signals
    from liger_trainer.trainers.checkpoints.resuming import CheckpointError
    from liger_trainer.trainers.checks.batches import BatchError
    from liger_trainer.trainers.checks.reward_functions import RewardError
    from liger_trainer.trainers.moe.router_z_loss import RouterLogitsError

    args = recipe.training
    if args.n_gpu > 1:
        raise RecipeError(
            f"One process sees {args.n_gpu} GPUs, which would run `nn.DataParallel`; start one process a GPU with "
            "`accelerate launch --multi_gpu` or `liger-trainer train --accelerate_config ddp`, or set "
            "CUDA_VISIBLE_DEVICES=0."
        )
    check_schedule(args, recipe.source)
    check_generation(args, recipe.source)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size < started:
        raise RecipeError(
            f"{started} processes were started, but on this device ({args.device}) each would train all of the recipe "
            "on its own; start one, or set `use_cpu: true`."
        )
    check_model(recipe)
    check_reward_models(recipe.more)
    checkpoint = prepare_output_dir(recipe)
    train, evaluation = load_data(recipe)
    if recipe.warm_start is not None:
        recipe = _after_warm_start(recipe, resumed=checkpoint is not None)
    set_seed(args.seed)
    tokenizer = load_tokenizer(recipe, train, checkpoint)
    try:
        trainer = build_trainer(recipe, tokenizer, train, evaluation, resumed=checkpoint is not None)
    except RecipeError:
        raise
    except UnpicklingError as error:
        raise RecipeError(
            f"{recipe.source}: the weights of {recipe.model.model_name_or_path!r} cannot be read: a file of them is "
            "damaged, or holds more than tensors. Copy it again, or save it as safetensors."
        ) from error
    except TemplateError as error:
        raise template_error(recipe, error) from error
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise RecipeError(f"{recipe.source}: {first_line(error)}{lora_advice(error, recipe)}") from error
    check_vocabulary(trainer, tokenizer)
    check_targets(recipe, trainer)
    check_prompts(recipe, trainer, train)
    check_adapted(recipe, trainer)
    check_optimizer(recipe, trainer)
    check_adapted_experts(recipe, trainer.model)
    _check_launch(recipe, trainer)
    _watch_routers(recipe, trainer)
    _narrow_logs(trainer)

    try:
        with stopping_on_signals(trainer):
            metrics = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
        _check_not_stopped(trainer)
        _check_began(recipe, trainer)
        if evaluation is not None:
            metrics.update(last_evaluation(trainer) or trainer.evaluate())
    except CheckpointError as error:
        raise RecipeError(str(error)) from error
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise RecipeError(f"{recipe.source}: {error.args[0]}") from error
    except BatchError as error:
        raise TrainingError(f"The data: {first_line(error)}") from error
    except RouterLogitsError as error:
        raise RecipeError(f"{recipe.source}: {first_line(error)}") from error
    except RewardError as error:
        raise TrainingError(first_line(error)) from error
    finally:
        close_progress_bar(trainer)
    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.save_metrics("all", metrics, combined=False)
    if args.push_to_hub:
        trainer.push_to_hub()
    return trainer, metrics


def _check_not_stopped(trainer: Any) -> None:
    """A training that its guard has stopped is not a finished one.

    Raises:
        NonFiniteError: if it is that.
    """
    from liger_trainer.callbacks.non_finite import NonFiniteError

    if trainer._guard is not None and trainer._guard.stopped:
        step = trainer.state.global_step
        folder = Path(str(trainer.args.output_dir), f"checkpoint-{step}")
        left = f"{str(folder)!r} holds the last good state" if folder.is_dir() else "no checkpoint was saved of it"
        raise NonFiniteError(f"stopped at step {step}, by `non_finite: stop`; {left}.")


def _check_began(recipe: Recipe, trainer: Trainer) -> None:
    """A training without a step, of which the Trainer makes no error, is none.

    Raises:
        RecipeError: if it is that.
    """
    if trainer.state.global_step == 0:
        batch, dropped = trainer.args.per_device_train_batch_size, trainer.args.dataloader_drop_last
        raise RecipeError(
            f"{recipe.source}: the data does not make one batch, so nothing was trained: `per_device_train_batch_size` "
            f"is {batch}, and `dataloader_drop_last` {str(dropped).lower()}. Give more rows, a smaller batch, or "
            "`dataloader_drop_last: false`."
        )


def _check_launch(recipe: Recipe, trainer: Trainer) -> None:
    """Warns where the recipe is written for a model that is split, and this one is not."""
    name = recipe.recipe.accelerate_config
    if name is None:
        return
    meant = yaml.safe_load(accelerate_config(name).read_text(encoding="utf-8")).get("distributed_type")
    split = {"FSDP": trainer.is_fsdp_enabled, "DEEPSPEED": trainer.is_deepspeed_enabled}
    if not split.get(meant, True):
        logger.warning(
            "%s is written for `accelerate_config: %s`, but the model is not split here; start it on GPUs with "
            "`liger-trainer train`, or with `accelerate launch --config_file` and that configuration.",
            *(recipe.source, name),
        )


def _watch_routers(recipe: Recipe, trainer: Trainer) -> None:
    """Adds what ``router_balance`` asks for, first in line, so that its numbers reach every reporter.

    Raises:
        RecipeError: if the model has no experts.
    """
    if not recipe.recipe.router_balance:
        return
    from liger_trainer.callbacks.router_balance import NO_EXPERTS, RouterBalanceCallback, experts_of

    model: Any = trainer.model
    if not any(experts_of(model)):
        raise RecipeError(
            f"{recipe.source}: `router_balance` is true, but {type(model).__name__} has {NO_EXPERTS}; leave it out."
        )
    trainer.callback_handler.callbacks.insert(0, RouterBalanceCallback())


def _narrow_logs(trainer: Trainer) -> None:
    """Takes our progress bar where the Trainer has its own."""
    from transformers import ProgressCallback

    from liger_trainer.callbacks.log_lines import LogLinesCallback

    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LogLinesCallback())


def _after_warm_start(recipe: Recipe, resumed: bool) -> Recipe:
    """`recipe` with the model that its warm start has trained; a resumed run takes the one it had."""
    from accelerate import PartialState

    assert recipe.warm_start is not None
    folder = str(recipe.warm_start.training.output_dir)
    if not resumed:
        logger.warning("The warm start: `trainer: sft` on %s.", recipe.warm_start.data.dataset_name or "its data")
        recipe.warm_start.recipe.overwrite_output_dir = (
            True  # it is ours, and an earlier try may have left it half done
        )
        recipe.warm_start.training.kernel_report = False  # type: ignore[attr-defined]  # the recipe's own follows
        train_recipe(recipe.warm_start)
        PartialState().wait_for_everyone()  # one process writes what all of them load
    elif not Path(folder).is_dir():
        raise RecipeError(f"The model of the warm start is not in {folder!r} any more; start the run again.")
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, model_name_or_path=folder, model_revision="main"),
        recipe=dataclasses.replace(
            recipe.recipe, model_config=None, tokenizer_name_or_path=None, tokenizer_vocab_size=None
        ),
    )


def close_progress_bar(trainer: Trainer) -> None:
    """Ends the bar's line: left open by an error, it would be drawn once more below the message."""
    for callback in trainer.callback_handler.callbacks:
        bar = getattr(callback, "training_bar", None)
        if bar is not None:
            bar.close()


def last_evaluation(trainer: Trainer) -> dict[str, float]:
    """What was logged where the last step ended in an evaluation of the model as it is now; else nothing."""
    if trainer.args.load_best_model_at_end:
        return {}
    entries = (entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step)
    return next((dict(entry) for entry in entries if "eval_loss" in entry), {})
