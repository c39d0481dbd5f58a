"""Resuming: checks of a checkpoint, what of a run it does not restore, and which arguments it overrides."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from liger_trainer.compat.accelerate import WRAPPED_OPTIMIZER
from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import RESUMING
from liger_trainer.optim.adamw import LigerAdamW
from liger_trainer.trainers.checkpoints.moving_reference import REFERENCE_FILE, reference_moves
from liger_trainer.trainers.checkpoints.run_state import RunStateMixin, rng_file
from liger_trainer.trainers.checkpoints.same_adapters import differing_adapters
from liger_trainer.trainers.checkpoints.same_base import differing_base
from liger_trainer.trainers.checkpoints.whole import complete_checkpoints, finish_interrupted, owned, step_of

logger = logging.getLogger("liger_trainer")

require(RESUMING)
require(WRAPPED_OPTIMIZER)

_WHOLE_MODEL = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_OF_TORCH = re.compile(  # other files are the user's own, and may be anything
    r"^(optimizer|scheduler|rng_state|pytorch_model|adapter_model|training_args|reference|trained_adapters)"
    r".*\.(pt|pth|bin)$|_states\.pt$"
)
_PICKLE = b"\x80\x02"  # the beginning of files of torch.save that are not zip archives
_ARGUMENTS = {"initial_lr": "learning_rate", "betas": "adam_beta1, adam_beta2", "eps": "adam_epsilon"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from; the text is the whole message."""


def common_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint in `folder` that all hosts have, each maybe on a disk of its own; None if none.

    All processes call this.

    Raises:
        CheckpointError: if some hosts have checkpoints, and no checkpoint is on all of them.
    """
    mine = {step_of(path): path for path in complete_checkpoints(folder)}
    of_all = gather_object([(socket.gethostname(), [*mine])])
    common = set(mine).intersection(*(steps for _, steps in of_all))
    last, has = max((max(steps, default=-1), host) for host, steps in of_all)
    lacks = next((host for host, steps in of_all if last not in steps), None)
    if not common and last >= 0:
        raise CheckpointError(
            f"{has} has the complete checkpoint-{last} in {str(folder)!r}, and {lacks} does not: copy it to the hosts "
            "that lack it (without overwriting their files), or resume in a folder that all hosts share. Hosts with "
            "folders of their own save whole checkpoints with `save_on_each_node: true` under DDP and ZeRO."
        )
    if lacks is not None and PartialState().is_main_process:
        logger.warning("%s is not complete on %s; it is not used.", folder / f"{PREFIX_CHECKPOINT_DIR}-{last}", lacks)
    return mine[max(common)] if common else None


class ResumingMixin(RunStateMixin):
    """Comes before a Trainer: checks a checkpoint before the Trainer resumes from it."""

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Trains; see [`~transformers.Trainer.train`]. ``True`` resumes from the last *complete* checkpoint.

        Raises:
            ValueError: if ``output_dir`` has no complete checkpoint.
            CheckpointError: if the checkpoint is damaged, has adapters and the run trains a whole model, or the
                reverse, or has adapters on another base or that do not fit those of this run.
            BlockingIOError: if checkpoints are to be saved and another run is writing in the folder.
        """
        saves = self.args.save_strategy != SaveStrategy.NO
        with owned(Path(self._get_output_dir(trial))) if saves else contextlib.nullcontext():
            if resume_from_checkpoint is True:
                found = common_checkpoint(Path(str(self.args.output_dir)))
                if found is None:
                    folder = f"`output_dir` {str(self.args.output_dir)!r}"
                    raise ValueError(
                        f"`resume_from_checkpoint` is True, but {folder} holds no complete checkpoint; leave it out to "
                        "start at the beginning."
                    )
                resume_from_checkpoint = str(found)
            if isinstance(resume_from_checkpoint, str | os.PathLike):
                resume_from_checkpoint = os.fspath(resume_from_checkpoint)
                checkpoint = Path(resume_from_checkpoint)
                finish_interrupted(checkpoint.parent)
                self._before_resuming(checkpoint)
            return super().train(resume_from_checkpoint, trial, *args, **kwargs)

    def _before_resuming(self, checkpoint: Path) -> None:
        _check(checkpoint, self.model)
        super()._before_resuming(checkpoint)
        self._say_what_is_lost(checkpoint)
        self._say_what_is_rounded_otherwise(checkpoint)

    def _say_what_is_lost(self, checkpoint: Path) -> None:
        """Warns if the checkpoint does not have all of a run's state, as with `save_only_model`."""
        if self.is_deepspeed_enabled or not self.is_world_process_zero():  # DeepSpeed's own loading raises
            return
        lost = {}
        if not any(checkpoint.glob("optimizer*")) or not (checkpoint / SCHEDULER_NAME).is_file():
            lost["optimizer.pt or scheduler.pt"] = "the optimizer and the learning rate schedule start again"
        if not (checkpoint / rng_file(self.args)).is_file():
            lost[rng_file(self.args)] = "random numbers will differ"
        if self._saved is None:  # a stock trainer's
            completions = "completions that wait to be trained on are generated again, and "
            completions = completions if self._buffers_completions else ""
            lost["state of a Liger trainer"] = f"{completions}losses and metrics since the last log are left out"
        if reference_moves(self) and not (checkpoint / REFERENCE_FILE).is_file():
            lost["reference model"] = "the one that `sync_ref_model` updates starts again from its initial weights"
        if lost:
            logger.warning("%s holds no %s: %s.", checkpoint, ", no ".join(lost), ", and ".join(lost.values()))

    def _say_what_is_rounded_otherwise(self, checkpoint: Path) -> None:
        before = (self._saved or {}).get("rounding", {})  # an earlier version has noted none
        changed = [
            f"`{name}` is {before[name]} in the checkpoint and {now} here"
            for name, now in self._rounding.items()
            if name in before and before[name] != now
        ]
        if changed and self.is_world_process_zero():
            logger.warning(
                "%s: %s. This run's value holds: its products are rounded in another way than before.",
                *(checkpoint, "; ".join(changed)),
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with naming(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None
        asked = [dict(group) for group in self.optimizer.param_groups]
        with naming(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            _check_optimizer(asked, self.optimizer)
        overruled = [*_overruled(asked, self.optimizer.param_groups), *self._overruled_steps()]
        if overruled and self.is_world_process_zero():
            logger.warning(
                "A resumed run uses the values of its checkpoint: %s. For others, start a new run on the model in %s.",
                *("; ".join(overruled), checkpoint),
            )
        if isinstance(self.lr_scheduler, LambdaLR) and self.lr_scheduler.last_epoch > 0:
            # The learning rate in the checkpoint was computed for the next step with the checkpoint's `max_steps`.
            self.lr_scheduler.last_epoch -= 1
            self.lr_scheduler.step()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of one step; none if the checkpoint is of the last one: the Trainer would do one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def _overruled_steps(self) -> Iterator[str]:
        asked = TrainerState()
        asked.compute_steps(self.args, self.state.max_steps)
        for kind in ("logging", "eval", "save"):
            given, restored = (getattr(state, f"{kind}_steps") for state in (asked, self.state))
            if getattr(self.args, f"{kind}_strategy") == "steps" and given != restored:
                yield f"`{kind}_steps` is {restored}, not {given}"


def _check_optimizer(asked: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for the state of another optimizer, which torch would load, and fail in the first step."""
    loaded, inner = optimizer.param_groups, getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    missing = sorted(
        {key for before, after in zip(asked, loaded, strict=False) for key in before.keys() - after.keys()}
    )
    if missing:
        raise ValueError(f"its optimizer has no {', '.join(map(repr, missing))}.")
    for weight, state in inner.state.items():
        if "exp_avg" in state and state["exp_avg"].shape != weight.shape:  # a fused step would write outside of it
            shapes = tuple(state["exp_avg"].shape), tuple(weight.shape)
            raise ValueError(f"its optimizer has a state of {shapes[0]} for a weight of {shapes[1]}.")
    ours = {"exp_avg_codes", "remainder"}
    if not isinstance(inner, LigerAdamW) and any(ours & state.keys() for state in inner.state.values()):
        raise ValueError(
            f"its states are LigerAdamW's, which {type(inner).__name__} cannot read. Set `optim: liger_adamw`, or "
            "write what `liger_trainer.optim.adamw_state_dict` makes of its optimizer.pt in the place of that file."
        )


def _overruled(asked: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> list[str]:
    """The optimizer's arguments that differ from the training arguments, a line for each."""
    lines: dict[str, None] = {}  # each once, though every group has it
    for before, after in zip(asked, loaded, strict=False):
        for key in before.keys() & after.keys() - {"params", "lr"}:  # the schedule computes `lr` from `initial_lr`
            if before[key] != after[key]:
                lines[f"`{_ARGUMENTS.get(key, key)}` is {after[key]}, not {before[key]}"] = None
    return sorted(lines)


def _check(checkpoint: Path, model: Any) -> None:
    """Refuses a checkpoint that is damaged or of another kind; reads only the headers of its files."""
    found = damage(checkpoint)
    if found is not None:
        whole = [path for path in complete_checkpoints(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
        before = next((path for path in reversed(whole) if damage(path) is None), None)
        advice = f"Resume from {str(before)!r}, the one before it." if before else "There is none before it."
        raise CheckpointError(f"The checkpoint is damaged: {found}. {advice}")
    adapters = [*checkpoint.glob("adapter_model.*"), *checkpoint.glob("*/adapter_model.*")]
    whole_model = [checkpoint / name for name in _WHOLE_MODEL if (checkpoint / name).is_file()]
    if isinstance(model, PeftModel) and whole_model and not adapters:
        raise CheckpointError(
            f"The checkpoint is one of a whole model ({str(whole_model[0])!r}), and this run trains adapters. Resume "
            "without adapters (`use_peft: false`), or train them on that model in a new run."
        )
    if not isinstance(model, PeftModel) and adapters and not whole_model:
        raise CheckpointError(
            f"The checkpoint is one of adapters ({str(adapters[0])!r}), and this run trains a whole model. Resume with "
            "the same adapters (`use_peft: true`)."
        )
    if isinstance(model, PeftModel) and (other := differing_base(checkpoint, model)) is not None:
        raise CheckpointError(
            f"The adapters in {str(checkpoint)!r} {other}. Resume with the base that they were trained on, or train "
            "new adapters in another `output_dir`. If it is the same base under a new name, write that into the "
            "checkpoint's adapter_config.json, as `base_model_name_or_path`."
        )
    if isinstance(model, PeftModel) and (other := differing_adapters(checkpoint, model)) is not None:
        raise CheckpointError(
            f"The adapters in {str(checkpoint)!r} {other}. Resume with the values of the checkpoint, or train new "
            "adapters in another `output_dir`."
        )


def damage(checkpoint: Path) -> str | None:
    """Which file of a checkpoint is truncated or missing, and how it shows; None if the checkpoint is complete."""
    for path in sorted(checkpoint.rglob("*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):  # compares the file's size with what its header says
                    pass
            elif _OF_TORCH.search(path.name) and not zipfile.is_zipfile(path):
                with path.open("rb") as file:
                    if file.read(2) != _PICKLE:
                        return f"{str(path)!r} is cut short"
            elif path.name == TRAINER_STATE_NAME:
                json.loads(path.read_text(encoding="utf-8"))
            elif path.name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
                shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
                missing = sorted(name for name in shards if not (path.parent / name).is_file())
                if missing:
                    return f"{str(path.parent / missing[0])!r} is missing"
        except Exception as error:
            return f"{str(path)!r} cannot be read ({_first_lines(error, 1)})"
    state = checkpoint / TRAINER_STATE_NAME
    return None if state.is_file() else f"{str(state)!r} is missing"


@contextlib.contextmanager
def naming(checkpoint: str) -> Iterator[None]:
    """Around the loading of a checkpoint: an error names the checkpoint, which may be of another model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint!r} does not fit this run: {_first_lines(error, 2)} Resume with the model and "
            "the optimizer it was saved with."
        ) from error


def _first_lines(error: Exception, count: int) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:count])
