"""The kernel flags that every `Liger*` configuration shares.

The mixin comes before a Hugging Face argument class in the bases, so its fields and defaults win, as in
`LigerTrainingArguments`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from liger_trainer.configs.caller_warnings import warnings_of_the_caller
from liger_trainer.configs.kernel_config import DEFAULT_LOGITS_MEMORY, KernelConfig, parse_bytes
from liger_trainer.configs.liger_adamw import NAMES, optim_of_transformers
from liger_trainer.configs.loss_types import check_loss_type
from liger_trainer.kernels.fp8.modes import Fp8Mode

if TYPE_CHECKING:
    # A mapping once the arguments are built, as in `TrainingArguments`; before that it may be JSON text.
    KernelSwitches = dict[str, Any] | Any
    Optim = str
    Switch = str | bool
else:
    KernelSwitches = dict | str
    Optim = Literal[NAMES]  # a command line lists them
    Switch = Literal["auto", "true", "false", True, False]  # as a command line and as YAML writes them


@dataclass
class KernelFlags:
    """Which kernels run, and what happens if one cannot.

    If `bf16` is not set in a TRL configuration, it is on for devices that support it, and off on the CPU. On CUDA, the
    `non_blocking` of `accelerator_config` is on, unless that sets it or is a file, or `dataloader_pin_memory` is off:
    the next batch is then collated while the GPU works on the last one.

    Args:
        use_liger_kernel (`bool`, *optional*, defaults to `True`):
            Whether to use the kernels of liger_trainer.
        liger_kernel_config (`dict` or `str`, *optional*):
            Switches by component, a mapping or a JSON object with fields of [`KernelConfig`].
            `fused_linear_cross_entropy` is read as `linear_cross_entropy`.
        logits_memory (`str` or `int`, *optional*, defaults to `"512MiB"`):
            Memory of one chunk of logits in the fused LM head: bytes, or a string such as `"1.5GB"`.
        retain_logits_memory (`str` or `int`, *optional*):
            Memory for logits that preference and policy losses save for backward, so that they are not recomputed:
            bytes, or a string such as `"2GiB"`; `0` saves none. By default as much as one chunk, which does not raise
            the peak.
        fp8 (`str`, *optional*):
            The mode in which the decoder's linear layers multiply in fp8: `"rowwise_gw_hp"`, forward and for the
            gradients of their inputs, with a scale for each row; `"rowwise"`, for the gradients of the weights too;
            `"tensorwise"`, all three with a scale for each tensor. Needs a GPU of NVIDIA's Hopper generation or newer.
            It changes losses and gradients.
        fp8_base (`bool`, *optional*, defaults to `False`):
            With LoRA adapters, whether the frozen linear layers of the decoder are stored in fp8, with a scale for each
            row: half of bf16's memory. Their products are in fp8 too. Those of a checkpoint in FP8 that stays packed
            multiply with the codes and scales that were published. Needs a GPU of NVIDIA's Hopper generation or newer,
            and one that holds the whole model. It changes losses and gradients.
        packed_base (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether a checkpoint published in 8 bits and fewer stays so in memory: FP8, MXFP4, MXFP8, NVFP4 and INT4
            (compressed-tensors, GPTQ, AWQ). Its weights are then frozen, and decoded where they are multiplied; losses
            are those of the dequantised model. `"auto"` keeps it packed if adapters are trained on it, `True` refuses
            any other model, and `False` leaves it to transformers. It is for a model that is given by its name; see
            [`load_packed`] for one that you load.
        strict_kernels (`bool`, *optional*, defaults to `False`):
            Whether a requested kernel that cannot be applied is an error instead of a line in the report.
        kernel_report (`bool`, *optional*, defaults to `True`):
            Whether the main process prints what was patched and what was not. The report is also
            `trainer.kernel_report`.
        non_finite (`str`, *optional*, defaults to `"stop"`):
            What happens at a step whose loss or gradients are not finite: `"stop"` skips the update, saves a
            checkpoint of the last good state and ends the training; `"skip"` skips the update and continues; `"off"`
            does not check. Except with `"off"`, parameters that are not finite are an error before training and before
            every save. See [`NonFiniteGuardCallback`].
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether a loss that is not finite is logged as the mean of the losses before it, which can be 0. Hugging
            Face's argument, which defaults to `True` there; the check makes every micro-batch wait for the device.
        router_z_loss_coef (`float`, *optional*, defaults to `0.0`):
            For a mixture of experts, the weight of the routers' z-loss in the training loss: mean of
            ``logsumexp(logits)^2`` over tokens and layers (ST-MoE, arXiv 2202.08906, which used 0.001), logged as
            `router_z_loss`. The model must return the routers' logits: set `router_aux_loss_coef` in TRL's trainers, or
            `model.config.output_router_logits`. Otherwise, and for a dense model, building the trainer is an error.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether tensors saved for backward wait in host memory: with gradient checkpointing, the inputs of the
            layers. Needs an accelerator. TRL's argument, here for every trainer.
        activation_offloading_fraction (`float`, *optional*, defaults to `1.0`):
            Fraction of those bytes that is offloaded, above 0 and at most 1: every second layer's input with 0.5. The
            rest stays on the accelerator, for a host with too little memory. Pinned memory may be allocated in powers
            of two, so that a tensor takes up to twice its size there.
        activation_memory (`str` or `int`, *optional*):
            With gradient checkpointing, memory for results that the layers keep for the backward pass instead of
            computing them again: bytes, a string such as `"20GiB"`, or `"auto"` for what the GPU has left. `0` keeps
            none, as does the default. Loss and gradients keep their bits.
        cuda_graphs (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether decoder layers run from CUDA graphs in training. `"auto"` uses them where that is possible and a
            step is too short for the host; `True` wherever it is possible, and is an error elsewhere.
        optim (`str`, *optional*, defaults to `"adamw_torch_fused"`):
            The optimizer: `"liger_adamw"` for [`LigerAdamW`], which trains weights in bf16 as fp32 weights, or one of
            transformers' `OptimizerNames`. With `"liger_adamw"`, `optim_args` may set its `states`, `master` and `seed`
            (by default the run's), such as `"states=bf16,master=stochastic"`; `none` is None. Not with DeepSpeed.

    Raises:
        ValueError: for an unknown component (the message names the nearest valid one), a flag or switch that is not a
            boolean, a configuration that is not a JSON object, a `logits_memory` or `retain_logits_memory` that is not
            a size, a `learning_rate` that is not finite or below 0, a `router_z_loss_coef` below 0, an
            `activation_offloading_fraction` that is out of range or given without `activation_offloading`, an
            `activation_memory` that is neither a size nor `"auto"`, an unknown `optim`, or `optim="liger_adamw"` with
            `optim_args` that it does not take or with DeepSpeed.
    """

    use_liger_kernel: bool = field(
        default=True, metadata={"help": "Whether to use the kernels of liger_trainer (RMSNorm, RoPE, fused LM head …)."}
    )
    liger_kernel_config: KernelSwitches | None = field(
        default=None,
        metadata={
            "help": "Switches by component as a JSON object, such as '{\"rms_norm\": false}'. Keys: attention, "
            "recurrence, short_conv, rope, latent, rms_norm, layer_norm, swiglu, geglu, relu_squared, lora, router, "
            "experts, load_balancing_loss, cross_entropy, linear_cross_entropy. All are on by default."
        },
    )
    logits_memory: str = field(
        default=DEFAULT_LOGITS_MEMORY,
        metadata={"help": "Memory of one chunk of logits in the fused LM head: bytes, or a size such as '512MiB'."},
    )
    retain_logits_memory: str | None = field(
        default=None,
        metadata={
            "help": "Memory for logits that preference and policy losses save for backward: bytes, or a size such as "
            "'2GiB'; 0 saves none. One chunk by default."
        },
    )
    fp8: Fp8Mode | None = field(
        default=None, metadata={"help": "Has the decoder's linear layers multiply in fp8, on NVIDIA's Hopper or newer."}
    )
    fp8_base: bool = field(
        default=False,
        metadata={
            "help": "Whether the frozen linear layers under LoRA adapters are stored in fp8, or stay as they were "
            "published in it, and multiply in it."
        },
    )
    packed_base: Switch = field(
        default="auto",
        metadata={
            "help": "Whether a checkpoint in 8 bits and fewer stays packed in memory under LoRA: 'true', 'false', or "
            "'auto' for wherever adapters are trained on it."
        },
    )
    strict_kernels: bool = field(
        default=False, metadata={"help": "Whether a requested kernel that cannot be applied is an error."}
    )
    kernel_report: bool = field(default=True, metadata={"help": "Whether to print what was patched and what was not."})
    non_finite: Literal["stop", "skip", "off"] = field(
        default="stop",
        metadata={
            "help": "At a loss or gradient that is not finite: 'stop' with a checkpoint, 'skip' the step, or 'off'."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Whether a loss that is not finite is logged as the mean of the losses before it, or 0."},
    )
    router_z_loss_coef: float = field(
        default=0.0, metadata={"help": "Weight of the z-loss of a mixture of experts' routers in the training loss."}
    )
    activation_offloading: bool = field(
        default=False, metadata={"help": "Whether tensors saved for backward wait in host memory, for long sequences."}
    )
    activation_offloading_fraction: float = field(
        default=1.0, metadata={"help": "Fraction of the bytes saved for backward that is offloaded: above 0, up to 1."}
    )
    activation_memory: str | None = field(
        default=None,
        metadata={
            "help": "With gradient checkpointing, memory for results that layers keep instead of computing them again: "
            "bytes, a size such as '20GiB', or 'auto' for what the GPU has left."
        },
    )
    cuda_graphs: Switch = field(
        default="auto",
        metadata={
            "help": "Whether decoder layers run from CUDA graphs in training: 'true', 'false', or 'auto' for wherever "
            "that is possible."
        },
    )
    optim: Optim = field(
        default=TrainingArguments.optim,
        metadata={
            "help": "The optimizer: 'liger_adamw', which trains bf16 weights as fp32 weights, or one of transformers'."
        },
    )

    def __post_init__(self) -> None:
        for name in ("use_liger_kernel", "fp8_base", "strict_kernels", "kernel_report", "activation_offloading"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be true or false.")
        packed_base_of(self)
        _check_offloading_fraction(self.activation_offloading_fraction, self.activation_offloading)
        coefficient = self.router_z_loss_coef
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
            raise ValueError(f"`router_z_loss_coef` is {coefficient!r}; it must be a number, 0 or more.")
        rate = getattr(self, "learning_rate", 0.0)
        if isinstance(rate, int | float) and not 0 <= rate < math.inf:
            raise ValueError(f"`learning_rate` is {rate!r}; it must be a finite number, 0 or more.")
        self.kernel_config()  # an error belongs here, where the user wrote the value
        retained_bytes_of(self)
        activation_memory_of(self)
        cuda_graphs_of(self)
        check_loss_type(self)
        if self.non_finite not in ("stop", "skip", "off"):
            raise ValueError(f"`non_finite` is {self.non_finite!r}; it must be 'stop', 'skip' or 'off'.")
        if isinstance(self.liger_kernel_config, str):
            self.liger_kernel_config = json.loads(self.liger_kernel_config)
        _set_default_bf16(self)
        _set_default_non_blocking(self)
        _rename_default_checkpointing(self)
        parent: Any = super()
        if hasattr(parent, "__post_init__"):
            with warnings_of_the_caller(), optim_of_transformers(self):
                _start_group_of_cpus(self)
                parent.__post_init__()
            _check_device_of_graphs(self)

    def kernel_config(self) -> KernelConfig:
        """The validated [`KernelConfig`]; `logits_memory` inside `liger_kernel_config` wins over the field."""
        return kernel_config_of(self)


def _start_group_of_cpus(args: Any) -> None:
    """Starts the gloo group of processes on the CPU with `ddp_timeout`; accelerate would give it torch's 30 minutes."""
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
    if not args.use_cpu or not launched or not torch.distributed.is_available():
        return
    gloo = args.ddp_backend in (None, "gloo") and not torch.distributed.is_mpi_available()
    if gloo and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.ddp_timeout))


def _set_default_bf16(args: Any) -> None:
    """Switches `bf16` off if it is not set and there is no hardware for it; TRL would switch it on.

    Raises:
        ValueError: If it is set on a GPU that emulates it, which transformers takes for hardware.
    """
    bf16 = getattr(args, "bf16", False)
    if bf16 is False:
        return
    emulated = not args.use_cpu and emulates_bf16()
    if bf16 and emulated:
        name = torch.cuda.get_device_name()
        raise ValueError(f"`bf16` is true, but {name} only emulates bf16, slowly; set `bf16: false` and `fp16: true`.")
    if bf16 is None and (args.use_cpu or emulated or not is_torch_bf16_gpu_available()):
        args.bf16 = False


def emulates_bf16() -> bool:
    """Whether this process's GPU is one of NVIDIA's before Ampere, such as a T4."""
    return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)


def copies_without_waiting(args: Any) -> bool:
    """Whether, unless `accelerator_config` says otherwise, accelerate copies batches to CUDA without waiting.

    A copy that waits ends when the GPU has finished the step before. Only then is the next batch collated and the next
    forward launched, and the GPU is idle meanwhile.
    """
    pinned = getattr(args, "dataloader_pin_memory", False) and not args.use_cpu
    return isinstance(args, KernelFlags) and pinned and torch.cuda.is_available()


def _set_default_non_blocking(args: Any) -> None:
    config = getattr(args, "accelerator_config", None)
    if isinstance(config, str) and config.startswith("{"):  # JSON text; transformers takes any other for a file
        config = json.loads(config)
    if copies_without_waiting(args) and isinstance(config, dict | None):
        args.accelerator_config = {"non_blocking": True, **(config or {})}


def _rename_default_checkpointing(args: Any) -> None:
    """Moves TRL's default of `gradient_checkpointing` to its newer name, if transformers has that.

    Otherwise transformers would warn of the older name, which the user has not written.
    """
    default = type(args).__dataclass_fields__.get("gradient_checkpointing")
    if default is None or getattr(args, "activation_checkpointing", False) is not None:
        return
    if args.gradient_checkpointing == default.default:
        args.activation_checkpointing = args.gradient_checkpointing


def _check_offloading_fraction(fraction: Any, offloading: bool) -> None:
    given = f"`activation_offloading_fraction` is {fraction!r}"
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(
            f"{given}; it must be a number above 0 and at most 1. For none, set `activation_offloading` to false."
        )
    if fraction != 1 and not offloading:
        raise ValueError(f"{given}, but `activation_offloading` is false; set it to true, or leave the fraction out.")


def kernel_config_of(args: Any) -> KernelConfig:
    """The [`KernelConfig`] of any training arguments, Hugging Face's own included."""
    return KernelConfig.parse(kernel_mapping_of(args))


def retained_bytes_of(args: Any) -> int | None:
    """`retain_logits_memory` of any training arguments, in bytes; None if it is not set."""
    value = getattr(args, "retain_logits_memory", None)
    return None if value is None else parse_bytes(value, "retain_logits_memory", at_least=0)


def activation_memory_of(args: Any) -> int | Literal["auto"] | None:
    """`activation_memory` of any training arguments: bytes, ``"auto"``, or None if it is not set."""
    value = getattr(args, "activation_memory", None)
    if value is None or value == "auto":
        return value
    try:
        return parse_bytes(value, "activation_memory", at_least=0)
    except ValueError as error:
        raise ValueError(f"{error} Or 'auto', for what the GPU has left.") from None


def packed_base_of(args: Any) -> bool | None:
    """Whether a packed checkpoint stays packed; None for ``"auto"``, and for Hugging Face's own arguments."""
    return _switch("packed_base", getattr(args, "packed_base", "auto"))


def cuda_graphs_of(args: Any) -> bool | None:
    """Whether layers run from CUDA graphs; None for ``"auto"``, and False for Hugging Face's own arguments."""
    return _switch("cuda_graphs", getattr(args, "cuda_graphs", False))


def _check_device_of_graphs(args: Any) -> None:
    """Refuses `cuda_graphs` where nothing can run from graphs, before a model is loaded."""
    if cuda_graphs_of(args) and args.device.type != "cuda":
        raise ValueError(
            f"`cuda_graphs` is true, but training is on {args.device.type}, which has no CUDA graphs. Set it to 'auto' "
            "or to false."
        )


def _switch(name: str, given: Any) -> bool | None:
    """True, False, or None for ``"auto"``; text is as on a command line."""
    if not isinstance(given, bool) and given not in ("auto", "true", "false"):
        raise ValueError(f"`{name}` is {given!r}; it must be true, false or 'auto'.")
    return given if isinstance(given, bool) else {"auto": None, "true": True, "false": False}[given]


def kernel_mapping_of(args: Any) -> dict[str, Any]:
    """The switches that the user has set, without defaults, so that `strict` can tell the two apart."""
    value = getattr(args, "liger_kernel_config", None)
    fp8 = getattr(args, "fp8", None)
    KernelConfig.parse(value, **({} if fp8 is None else {"fp8": fp8}))  # for our own error messages
    mapping = dict((json.loads(value) if isinstance(value, str) else value) or {})
    mapping.setdefault("logits_memory", getattr(args, "logits_memory", DEFAULT_LOGITS_MEMORY))
    mapping.setdefault("fp8", fp8)
    return mapping


@dataclass
class LigerTrainingArguments(KernelFlags, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the flags of [`KernelFlags`]; the kernels are on by default.

    For [`LigerTrainer`]; of the flags, the stock `Trainer` reads `use_liger_kernel` and `liger_kernel_config` alone.
    """
