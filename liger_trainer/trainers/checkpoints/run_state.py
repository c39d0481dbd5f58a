"""What decides the next step of a run, and the Trainer does not save: it joins the random numbers in a checkpoint.

The Trainer saves weights, optimizer, schedule, counters and random numbers. It does not save

- completions that wait to be trained on, and the counters of the trainers that generate them;
- the order of an epoch, where a sampler draws it from numbers that have moved on since: those of a generator of its
  own, or those of torch, Python or NumPy;
- the random numbers of the next batch, which is collated while the one before is trained on;
- losses and metrics since the last log.

The position in a streamed dataset is in the Trainer's file, but the Trainer reads it as if there were one epoch.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import send_to_device
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import has_length

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import RUN_STATE
from liger_trainer.head.warn_once import warn_once

logger = logging.getLogger("liger_trainer")

require(RUN_STATE)

_KEY = "liger_trainer"
"""Of our values in the Trainer's file of random numbers, of which each process has its own."""

_OF_GENERATION = ("_step", "_buffered_inputs")
_OF_LOGS = ("_metrics", "_stored_metrics", "_total_train_tokens")
"""Attributes of TRL's trainers, which `compat/trl.py` checks."""

_LAYOUT = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    *("num_generations", "world_size", "beta"),
)
"""The arguments that say which completions a process has, which micro-batch they belong to, and what is with them."""

_ROUNDING = ("fp8", "fp8_base")
"""The arguments that say how the operands of products are rounded."""


def rng_file(args: TrainingArguments) -> str:
    """The name of the file with this process's random numbers in a checkpoint."""
    return "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"


def is_of_ours(checkpoint: Path) -> bool:
    """Whether a Liger trainer has saved a checkpoint, with all of its state."""
    files = sorted(checkpoint.glob("rng_state*.pth"))  # the same one for every process
    return bool(files) and _KEY in _read(files[0])


class RunStateMixin(Trainer):
    """Comes before a Trainer: a run goes on from its checkpoint as if it had not been interrupted."""

    _saved: Mapping[str, Any] | None = None  # our values in the checkpoint that the run resumes from
    _saved_max_steps = 0
    _epoch_began: Mapping[str, Any] | None = None
    _samplers: Sequence[Any] = ()
    _next_batch: Mapping[str, Any]  # the random numbers with which it was collated, before the last step
    _collated = 0  # batches of this epoch
    _once_collated: dict[int, Callable[[], None]] | None = None  # what follows the batch of this number
    _to_load: str | None = None  # the checkpoint whose random numbers hold once the next batch is collated
    _has_loaded = False  # whether the Trainer need not load them

    def _before_resuming(self, checkpoint: Path) -> None:
        """Reads a checkpoint; to be called before the Trainer does."""
        self._saved_max_steps = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).max_steps
        path = checkpoint / rng_file(self.args)
        self._saved = _read(path).get(_KEY) if path.is_file() else None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._epoch_began is None:  # saved by hand, without a training
            return
        loss = self._tr_loss.detach()
        state = {
            **self._epoch_began,
            "samplers_now": [_state_of(sampler) for sampler in self._samplers],
            "next_batch": self._next_batch,
            "seeds": self._seeds,
            "loss": loss,
            "last_logged": self._globalstep_last_logged,
            "logs": self._plain_values(_OF_LOGS),
            "layout": self._layout,
            "rounding": self._rounding,
            "generation": self._plain_values(_OF_GENERATION),
        }
        path = Path(output_dir, rng_file(self.args))
        torch.save({**_read(path), _KEY: _plain(state)}, path)

    def _plain_values(self, names: Sequence[str]) -> dict[str, Any]:
        """These attributes; none of them if one holds what a checkpoint cannot, which is said once."""
        try:
            return {name: _plain(getattr(self, name)) for name in names if hasattr(self, name)}
        except TypeError as error:
            warn_once(
                f"unsaved {names}",
                f"Checkpoints leave {', '.join(f'`{name}`' for name in names)} of the trainer out, without which a "
                f"resumed run differs: {error}. (Shown once.)",
            )
            return {}

    @property
    def _buffers_completions(self) -> bool:
        return all(hasattr(self, name) for name in _OF_GENERATION)

    @property
    def _layout(self) -> dict[str, Any]:
        return {name: getattr(self.args, name) for name in _LAYOUT if hasattr(self.args, name)}

    @property
    def _rounding(self) -> dict[str, Any]:
        return {name: getattr(self.args, name) for name in _ROUNDING if hasattr(self.args, name)}

    @property
    def _seeds(self) -> list[int | None]:
        return [self.args.seed, self.args.data_seed]

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        position = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        if has_length(self.train_dataset) or not self.state.global_step or not self.state.epoch:
            return position
        # The Trainer counts a stream as one epoch of all steps, but begins another one where the stream ends.
        epoch = math.ceil(self.state.epoch) - 1
        batches = self._saved_max_steps * self.args.gradient_accumulation_steps
        batches = batches if self._saved is None else self._saved["steps_in_epoch"]
        return epoch, 0 if self.args.ignore_data_skip else round((self.state.epoch - epoch) * batches)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super()._run_epoch).bind(*args, **kwargs).arguments
        epoch, checkpoint = given["epoch"], given["resume_from_checkpoint"]
        self._samplers = list(_samplers(given["train_dataloader"]))
        self._to_load, self._has_loaded = None, False
        self._collated, self._once_collated = 0, {1: self._note_random_numbers}
        if checkpoint is not None and epoch == given["epochs_trained"]:
            self._resume(checkpoint, given["train_dataloader"], epoch, given["steps_trained_in_current_epoch"])
        self._epoch_began = {
            "epoch": epoch,
            "steps_in_epoch": given["steps_in_epoch"],
            "random": random_numbers(),
            "samplers": [_state_of(sampler) for sampler in self._samplers],
        }
        super()._run_epoch(*args, **kwargs)

    def _resume(self, checkpoint: str, loader: Any, epoch: int, skipped: int) -> None:
        """Restores what the run of the checkpoint had before `epoch`, of which it has trained on `skipped` batches."""
        if skipped:
            self._to_load, self._has_loaded = checkpoint, True
        else:
            self._load_rng_state(checkpoint)
        saved = self._saved
        loss = torch.zeros_like(self._tr_loss) if saved is None else saved["loss"].to(self._tr_loss.device)
        loss_of_all = self.accelerator.gather(loss.clone()).mean().item()  # a process without its file takes part
        if saved is None:
            return
        within = saved["epoch"] == epoch
        if saved["seeds"] == self._seeds:  # otherwise another order is asked for
            for sampler, state in zip(self._samplers, saved["samplers" if within else "samplers_now"], strict=False):
                _set_state_of(sampler, state)
            if within and skipped:
                self._restore_random_numbers(saved, loader, 0 if has_length(self.train_dataset) else skipped)
        self._tr_loss = loss
        self._total_loss_scalar -= loss_of_all  # `train_loss` is that of the steps after the checkpoint
        self._globalstep_last_logged = saved["last_logged"]
        self._set_values(saved["logs"])
        changed = [name for name, value in self._layout.items() if saved["layout"].get(name) != value]
        if not changed:
            self._set_values(send_to_device(saved["generation"], self.args.device))
        elif saved["generation"] and self.is_world_process_zero():
            logger.warning(
                "%s differ from those of the checkpoint, whose completions are left out: new ones are generated.",
                ", ".join(f"`{name}`" for name in changed),
            )

    def _restore_random_numbers(self, saved: Mapping[str, Any], loader: Any, again: int) -> None:
        """Restores those that order the epoch, and those with which its next batch is collated.

        The loader, which is not iterated yet, collates `again` batches again before it leaves them out.
        """
        set_random_numbers(saved["random"])
        assert self._once_collated is not None
        if self.args.dataloader_num_workers:  # whose random numbers follow from these
            return
        if again:
            self._once_collated[again] = lambda: set_random_numbers(saved["next_batch"])
        elif not any(_draws_from_all(sampler) for sampler in self._samplers):
            set_random_numbers(saved["next_batch"])
            loader.generator = torch.Generator()  # otherwise it draws a seed for workers before the batch

        def collated() -> None:
            self._load_random_numbers()
            vars(loader).pop("generator", None)

        self._once_collated[again + 1] = collated

    def _set_values(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                _update(getattr(self, name), value)
            else:
                setattr(self, name, value)

    def _note_random_numbers(self) -> None:
        self._next_batch = random_numbers()

    def _load_random_numbers(self) -> None:
        if self._to_load is not None:
            super()._load_rng_state(self._to_load)
            self._to_load = None
            self._note_random_numbers()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._has_loaded:  # earlier, as the next batches may draw some before they are trained on
            self._has_loaded = False
        else:
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of one step; see [`~transformers.Trainer.get_batch_samples`]."""
        result = super().get_batch_samples(self._noting(epoch_iterator), *args, **kwargs)
        self._load_random_numbers()
        return result

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`; each call collates the one after the batch that it returns."""
        while True:
            self._note_random_numbers()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        collator = self.data_collator
        if kwargs.get("is_training", False) and self.is_in_train and not self.args.dataloader_num_workers:
            self.data_collator = functools.partial(self._collate, collator)
        try:
            return super()._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.data_collator = collator

    def _collate(self, collator: Callable[[Any], Any], features: Any) -> Any:
        batch = collator(features)
        self._collated += 1
        if self._once_collated and self._collated in self._once_collated:
            self._once_collated.pop(self._collated)()
        return batch


def _read(path: Path) -> dict[str, Any]:
    with safe_globals():  # of NumPy, in the Trainer's part
        return torch.load(path, map_location="cpu", weights_only=True)


def _samplers(loader: Any) -> Iterator[Any]:
    """The samplers of a data loader that wrap no other, and its dataset."""
    inner = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    found = [each for sampler in inner if sampler is not None for each in _samplers(sampler)]
    yield from found or [loader]
    if hasattr(loader, "dataset"):
        yield loader.dataset


def _draws_from_all(sampler: Any) -> bool:
    """Whether a sampler may order an epoch by the random numbers of the whole program, and not by a seed of its own."""
    seeded = hasattr(sampler, "initial_seed") or isinstance(getattr(sampler, "generator", None), torch.Generator)
    return isinstance(sampler, Sampler) and not seeded and not isinstance(sampler, SequentialSampler)


def _state_of(sampler: Any) -> dict[str, Any]:
    generator = getattr(sampler, "generator", None)
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    return {"generator": state, "initial_seed": getattr(sampler, "initial_seed", None)}


def _set_state_of(sampler: Any, state: Mapping[str, Any]) -> None:
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator) and state["generator"] is not None:
        generator.set_state(state["generator"])
    if state["initial_seed"] is not None:
        sampler.initial_seed = state["initial_seed"]


def random_numbers() -> dict[str, Any]:
    """The states of the generators that order and collate batches, all of which are the host's."""
    return {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}


def set_random_numbers(states: Mapping[str, Any]) -> None:
    """Restores what [`random_numbers`] has returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def _plain(value: Any) -> Any:
    """`value` of types that `torch.load` reads with ``weights_only=True``, with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value)) if isinstance(value, tuple) else list(map(_plain, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is neither a tensor nor a number nor a text")


def _update(into: Any, values: Mapping[str, Any]) -> None:
    """As `dict.update`, but dictionaries inside stay the objects they are."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _update(into[key], value)
        else:
            into[key] = value
