"""The kernel flags that every `Liger*` configuration shares.

The mixin comes before a Hugging Face argument class in the bases, so its fields and defaults win::

    @dataclass
    class LigerTrainingArguments(KernelFlags, TrainingArguments): ...
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import DICT_ARGUMENTS
from liger_trainer.configs.kernel_config import DEFAULT_LOGITS_MEMORY, KernelConfig, parse_bytes
from liger_trainer.configs.loss_types import check_loss_type

require(DICT_ARGUMENTS)


def with_dict_fields(base: type[TrainingArguments]) -> list[str]:
    """`base`'s list of fields that take a JSON object on the command line, with ours added."""
    return [*base._VALID_DICT_FIELDS, "liger_kernel_config"]


if TYPE_CHECKING:
    _Base = TrainingArguments
else:
    _Base = object


@dataclass
class KernelFlags(_Base):
    """Which kernels run, and what happens where one cannot.

    Where a configuration of TRL leaves `bf16` open, it is on for devices that have it, and off on the CPU.

    Args:
        use_liger_kernel (`bool`, *optional*, defaults to `True`):
            Whether to use the kernels of liger_trainer.
        liger_kernel_config (`dict` or `str`, *optional*):
            Switches by component, a mapping or a JSON object: `rope`, `rms_norm`, `layer_norm`, `swiglu`, `geglu`,
            `relu_squared`, `lora`, `router`, `experts`, `load_balancing_loss`, `cross_entropy`,
            `linear_cross_entropy`, each `True` by default. `fused_linear_cross_entropy` is read as
            `linear_cross_entropy`. `recompute_mlp`, `True` by default, and `tiled_mlp`, `False`, make gated MLPs keep
            less for the backward. With `global_load_balancing`, `False` by default, the auxiliary loss balances the
            batch of all processes. See [`KernelConfig`].
        logits_memory (`str` or `int`, *optional*, defaults to `"512MiB"`):
            Memory the fused LM head may spend on one chunk of logits: bytes, or a string such as `"1.5GB"`.
        retain_logits_memory (`str` or `int`, *optional*):
            Memory for logits that preference and policy losses keep from the forward to the backward, which then
            computes them no second time: bytes, or a string such as `"2GiB"`; `0` keeps none. By default as much as
            one chunk, which costs nothing at the peak.
        strict_kernels (`bool`, *optional*, defaults to `False`):
            Whether a kernel that is asked for and cannot be applied is an error instead of a line in the report.
        kernel_report (`bool`, *optional*, defaults to `True`):
            Whether the main process prints what was patched and what was left alone. The report is also kept as
            `trainer.kernel_report`.
        non_finite (`str`, *optional*, defaults to `"stop"`):
            What happens at a step whose loss or gradients are not finite: `"stop"` leaves the update out, saves a
            checkpoint of the last good state and ends the training; `"skip"` leaves the update out and goes on;
            `"off"` does not look. Parameters that are not finite are an error before training and before every save,
            except with `"off"`. See [`NonFiniteGuardCallback`].
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether a loss that is not finite is logged as the mean of those before it, which can be 0. It is
            Hugging Face's argument, on there; looking for such a loss makes every micro-batch wait for the device.
        router_z_loss_coef (`float`, *optional*, defaults to `0.0`):
            For a mixture of experts, how much of the routers' z-loss (mean of ``logsumexp(logits)^2`` over tokens and
            layers, ST-MoE, arXiv 2202.08906, which used 0.001) the training loss gets; logged as `router_z_loss`. The
            routers' logits must be asked for, by `router_aux_loss_coef` in the trainers of TRL or by
            `model.config.output_router_logits`; a trainer is not made where they are not, or the model is dense.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether what the forward keeps for the backward waits in the CPU's memory: with gradient checkpointing, the
            inputs of the layers. Needs an accelerator. TRL's, in the trainers that do not have it too.
        activation_offloading_fraction (`float`, *optional*, defaults to `1.0`):
            Of those bytes the fraction that is offloaded, above 0 and at most 1: every second layer's input with 0.5.
            The rest stays on the accelerator, for a host with less memory than all of them would take. Pinned memory
            may be handed out in powers of two, so that a tensor takes up to twice its size there.

    Raises:
        ValueError: for an unknown component (the nearest valid one is named), a flag or switch that is no boolean, a
            configuration that is not a JSON object, a `logits_memory` or `retain_logits_memory` that is no size, a
            `learning_rate` that is not finite or below 0, a
            `router_z_loss_coef` below 0, or an `activation_offloading_fraction` that is out of range, or given without
            `activation_offloading`.
    """

    use_liger_kernel: bool = field(
        default=True, metadata={"help": "Whether to use the kernels of liger_trainer (RMSNorm, RoPE, fused LM head …)."}
    )
    liger_kernel_config: dict | str | None = field(  # type: ignore[assignment]  # takes more than the base's
        default=None,
        metadata={
            "help": "Switches by component as a JSON object, such as '{\"rms_norm\": false}'. Keys: rope, rms_norm, "
            "layer_norm, swiglu, geglu, relu_squared, lora, router, experts, load_balancing_loss, "
            "cross_entropy, linear_cross_entropy. All are on by default."
        },
    )
    logits_memory: str = field(
        default=DEFAULT_LOGITS_MEMORY,
        metadata={"help": "Memory the fused LM head may spend on one chunk of logits: bytes, or such as '512MiB'."},
    )
    retain_logits_memory: str | None = field(
        default=None,
        metadata={
            "help": "Memory for logits that preference and policy losses keep for the backward: bytes, or such as "
            "'2GiB'; 0 keeps none. One chunk by default."
        },
    )
    strict_kernels: bool = field(
        default=False,
        metadata={"help": "Whether a kernel that is asked for and cannot be applied is an error."},
    )
    kernel_report: bool = field(
        default=True, metadata={"help": "Whether to print what was patched and what was left alone."}
    )
    non_finite: Literal["stop", "skip", "off"] = field(
        default="stop",
        metadata={"help": "At a loss or gradient that is not finite: 'stop' with a checkpoint, 'skip' it, or 'off'."},
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Whether a loss that is not finite is logged as the mean of those before it, or 0."},
    )
    router_z_loss_coef: float = field(
        default=0.0,
        metadata={"help": "How much of the z-loss of a mixture of experts' routers the training loss gets."},
    )
    activation_offloading: bool = field(
        default=False,
        metadata={"help": "Whether what is kept for the backward waits in the CPU's memory, as for long sequences."},
    )
    activation_offloading_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Of what is kept for the backward, the fraction of bytes that is offloaded: above 0, up to 1."
        },
    )

    def __post_init__(self) -> None:
        for name in ("use_liger_kernel", "strict_kernels", "kernel_report", "activation_offloading"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be true or false.")
        _check_offloading_fraction(self.activation_offloading_fraction, self.activation_offloading)
        coefficient = self.router_z_loss_coef
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
            raise ValueError(f"`router_z_loss_coef` is {coefficient!r}; it must be a number, 0 or more.")
        rate = getattr(self, "learning_rate", 0.0)
        if isinstance(rate, int | float) and not 0 <= rate < math.inf:
            raise ValueError(f"`learning_rate` is {rate!r}; it must be a finite number, 0 or more.")
        self.kernel_config()  # errors belong here, where the user wrote the value
        retained_bytes_of(self)
        check_loss_type(self)
        if self.non_finite not in ("stop", "skip", "off"):
            raise ValueError(f"`non_finite` is {self.non_finite!r}; it must be 'stop', 'skip' or 'off'.")
        if isinstance(self.liger_kernel_config, str):
            self.liger_kernel_config = json.loads(self.liger_kernel_config)
        if getattr(self, "bf16", False) is None and (self.use_cpu or not is_torch_bf16_gpu_available()):
            self.bf16 = False  # TRL's default is True on every device, and an error where it has no bf16
        _rename_default_checkpointing(self)
        parent: Any = super()
        if hasattr(parent, "__post_init__"):
            parent.__post_init__()

    def kernel_config(self) -> KernelConfig:
        """The validated [`KernelConfig`]; `logits_memory` inside `liger_kernel_config` wins over the field."""
        return kernel_config_of(self)


def _rename_default_checkpointing(args: Any) -> None:
    """Gives TRL's default of `gradient_checkpointing` the newer name, where transformers knows it.

    transformers would warn of the older name, which the user has not written.
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
    """`retain_logits_memory` of any training arguments in bytes; None where it is not set."""
    value = getattr(args, "retain_logits_memory", None)
    return None if value is None else parse_bytes(value, "retain_logits_memory", at_least=0)


def kernel_mapping_of(args: Any) -> dict[str, Any]:
    """As [`kernel_config_of`], but only what was written down, so that `strict` can tell it from the defaults."""
    value = getattr(args, "liger_kernel_config", None)
    KernelConfig.parse(value)  # errors with our words
    mapping = dict((json.loads(value) if isinstance(value, str) else value) or {})
    mapping.setdefault("logits_memory", getattr(args, "logits_memory", DEFAULT_LOGITS_MEMORY))
    return mapping
