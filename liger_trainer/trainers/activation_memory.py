"""`activation_memory` in a trainer: when it works, where it is refused, its log, and resuming with it.

Before it: offloading of activations, of all that autograd saves for the backward or a fraction of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary
from tqdm.auto import tqdm
from transformers import TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import LoggedMetricsCallback
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import PARTIAL_OFFLOADING
from liger_trainer.compat.trl import OFFLOADING
from liger_trainer.configs.flags import activation_memory_of
from liger_trainer.patching.report import KernelReport
from liger_trainer.plan.running import checkpoints_layers
from liger_trainer.recompute.activation_memory import ActivationMemory
from liger_trainer.recompute.budget import DeviceMemory, RecordedStep
from liger_trainer.trainers.checkpoints.resuming import ResumingMixin

require(PARTIAL_OFFLOADING)


def check_offloading(args: TrainingArguments) -> None:
    """Checks that there is a device to offload from."""
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise ValueError("`activation_offloading` is true, but training is on the CPU; set it to false.")


def step_offloading(trainer: Any) -> contextlib.AbstractContextManager:
    """The context that a training step is to run in: TRL's activation offloading, of the fraction that is asked for.

    The trainers of TRL that offload by themselves get a context that does nothing; theirs is reduced to the fraction.
    """
    args = trainer.args
    if not getattr(args, "activation_offloading", False):
        return contextlib.nullcontext()
    get_act_offloading_ctx_manager, *_ = require(OFFLOADING)
    fraction = getattr(args, "activation_offloading_fraction", 1.0)
    of_trl = getattr(trainer, "maybe_activation_offload_context", None)  # which TRL's training step enters
    if of_trl is not None:
        if fraction < 1:
            trainer.maybe_activation_offload_context = PartialOffload(of_trl, fraction)
        return contextlib.nullcontext()
    check_offloading(args)
    context = get_act_offloading_ctx_manager(trainer.model)
    return PartialOffload(context, fraction) if fraction < 1 else context


class PartialOffload(saved_tensors_hooks):
    """Passes a fraction of what autograd saves for the backward to hooks that offload it; the rest stays on the device.

    Tensors are chosen by error diffusion over their bytes, in the order in which they are saved. The choice is spread
    evenly over the forward, is the same at every step, and misses the fraction by at most half of the largest tensor.
    A tensor and its views share one decision. Parameters do not count; the hooks of `offload` leave them alone.
    """

    def __init__(self, offload: saved_tensors_hooks, fraction: float) -> None:
        self.offload = offload
        self.fraction = fraction
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._due = 0.0  # bytes that should have been offloaded so far, less those that were
        self._moved: Any = WeakTensorKeyDictionary()  # whether a tensor is offloaded
        self.offload.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.offload.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> Any:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return self.offload.pack_hook(tensor)
        if whole not in self._moved:
            self._due += self.fraction * tensor.nbytes
            self._moved[whole] = self._due >= tensor.nbytes / 2
            self._due -= tensor.nbytes * self._moved[whole]
        # Detached: an output that its own graph references would stay until the garbage collector runs.
        return self.offload.pack_hook(tensor) if self._moved[whole] else tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        # What the offloading hooks have packed is a key, never a tensor.
        return packed if isinstance(packed, torch.Tensor) else self.offload.unpack_hook(packed)


logger = logging.getLogger("liger_trainer")

_FILE = "activation_memory.json"  # in a checkpoint
_GIB = 2**30


class KeptActivationsCallback(LoggedMetricsCallback):
    """Logs `kept_activations_gib`, what the layers kept of the last micro-batch instead of recomputing it."""

    def __init__(self, kept: ActivationMemory) -> None:
        self._kept = kept

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """GiB of activations that this process keeps."""
        return {"kept_activations_gib": round(self._kept.kept / _GIB, 3)}


class ActivationMemoryMixin(ResumingMixin):
    """Comes before a Trainer: its checkpointed layers keep what `activation_memory` allows."""

    model: nn.Module
    kernel_report: KernelReport | None
    _kept: ActivationMemory | None = None

    def _prepare_activation_memory(self) -> None:
        """To be called once the trainer is built."""
        budget = activation_memory_of(self.args)
        if not budget or not _can_keep(self):
            return
        device = self.args.device
        memory = None if device.type == "cpu" else DeviceMemory(device)
        self._kept = ActivationMemory(budget, device, memory)
        self.callback_handler.callbacks.insert(0, KeptActivationsCallback(self._kept))

    def _let_layers_keep(self, kept: ActivationMemory) -> None:
        """To be called before the forward of every loss in training."""
        # Not earlier: TRL's trainers have a reference model answer first, and give the layers their functions again.
        line = kept.begin(self.model_wrapped, self.state.global_step)
        if line is not None:
            self._announce(line)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch; see [`~transformers.Trainer.training_step`]."""
        loss = super().training_step(*args, **kwargs)
        if self._kept is not None:
            self._kept.end()
        return loss

    def _announce(self, line: str) -> None:
        if self.is_world_process_zero() and getattr(self.args, "kernel_report", True):
            tqdm.write(line)  # not into the progress bar
        if self.kernel_report is not None:
            self.kernel_report = dataclasses.replace(self.kernel_report, remarks=(*self.kernel_report.remarks, line))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model; see [`~transformers.Trainer.save_model`]."""
        super().save_model(output_dir, _internal_call)
        in_checkpoint = _internal_call and output_dir is not None and self.args.should_save
        planned = None if self._kept is None else self._kept.planned
        if in_checkpoint and planned is not None:
            values = {"run": self._run(), "limit": planned.limit, "record": planned.record.to_dict()}
            Path(str(output_dir), _FILE).write_text(json.dumps(values), encoding="utf-8")

    def _before_resuming(self, checkpoint: Path) -> None:
        super()._before_resuming(checkpoint)
        if self._kept is None:
            return
        found: list[Any] = [None]
        if self.is_world_process_zero() and (checkpoint / _FILE).is_file():
            found = [json.loads((checkpoint / _FILE).read_text(encoding="utf-8"))]
        values = broadcast_object_list(found)[0]  # the others may not see the first process's disk
        if values is not None and values["run"] == self._run():
            self._kept.resume(RecordedStep.from_dict(values["record"]), values["limit"])

    def _run(self) -> dict[str, Any]:
        """What a record is valid for."""
        args: Any = self.args
        model: Any = self.accelerator.unwrap_model(self.model)
        device = args.device if args.device.type == "cpu" else torch.get_device_module(args.device).get_device_name()
        drops = {key: value for key, value in model.config.get_text_config().to_dict().items() if "drop" in key}
        text = f"{model!r} {drops} {args.liger_kernel_config if self.kernel_report else None}"
        names = ("activation_memory", "gradient_accumulation_steps", "per_device_train_batch_size", "world_size")
        return {
            "format": 2,  # with the highest peak of all steps
            "model": hashlib.sha256(text.encode()).hexdigest(),
            "device": str(device),
            "torch": torch.__version__,
            "optim": str(args.optim),
            **{name: getattr(args, name) for name in names},
        }


def check_selective(args: Any) -> None:
    """Checks that TRL's own choice of what to keep, which it takes out of the arguments, is not asked for too."""
    if activation_memory_of(args) is not None and _checkpointing_kwargs(args).get("selective"):
        raise ValueError(
            f"`activation_memory` is {args.activation_memory!r}, and `gradient_checkpointing_kwargs` has `selective`, "
            "which keeps attention in every layer. Leave one of them out; `activation_memory` keeps attention first."
        )


def _can_keep(trainer: Any) -> bool:
    """Whether the layers can keep anything; False, with a warning, for reentrant checkpointing.

    Raises:
        ValueError: for `activation_memory` without gradient checkpointing, with a compiler or with a `context_fn` of
            the user; and for `"auto"` on a CPU, or with vLLM on the same device.
    """
    args = trainer.args
    given = f"`activation_memory` is {args.activation_memory!r}"
    if not checkpoints_layers(trainer):
        raise ValueError(
            f"{given}, which says what checkpointed layers keep, but `gradient_checkpointing` is false and every layer "
            "keeps all. Set `gradient_checkpointing: true`, or leave `activation_memory` out."
        )
    if args.torch_compile:
        raise ValueError(
            f"{given}, and `torch_compile` is true: the compiler chooses itself what is recomputed. Leave one of them "
            "out."
        )
    if _checkpointing_kwargs(args).get("context_fn") is not None:
        raise ValueError(f"{given}, and `gradient_checkpointing_kwargs` has a `context_fn`. Leave one of them out.")
    if args.activation_memory == "auto":
        if args.device.type == "cpu":
            raise ValueError(f"{given}, but training is on the CPU, whose memory is not measured; give bytes.")
        if getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", None) == "colocate":
            raise ValueError(
                f"{given}, but vLLM shares the device (`vllm_mode` is 'colocate') and takes memory when it wakes up; "
                "give bytes."
            )
    if args.gradient_checkpointing and _checkpointing_kwargs(args).get("use_reentrant"):
        logger.warning(
            "%s, but checkpointing is reentrant (`use_reentrant` in `gradient_checkpointing_kwargs`), with which "
            "layers keep nothing.",
            given,
        )
        return False
    return True


def _checkpointing_kwargs(args: Any) -> dict[str, Any]:
    return getattr(args, "gradient_checkpointing_kwargs", None) or {}
