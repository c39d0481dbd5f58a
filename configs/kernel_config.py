"""Which kernels to use: the one place that knows the keys of `liger_kernel_config`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from liger_trainer.kernels.fp8.modes import Fp8Mode

DEFAULT_LOGITS_MEMORY = "512MiB"

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ALIASES = {"fused_linear_cross_entropy": "linear_cross_entropy"}  # the name Liger and TRL use


def parse_bytes(value: int | str, name: str = "logits_memory", at_least: int = 1) -> int:
    """Bytes from an int or a string with a unit, such as ``"512MiB"`` or ``"1.5 GB"``; `name` is for the error."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        unit = match.group(2).lower() if match else "?"
        if match is None or unit not in _UNITS or (_UNITS[unit] == 1 and "." in match.group(1)):
            raise ValueError(f"`{name}` is {value!r}; give bytes as an int, or a string such as '512MiB' or '1.5GB'.")
        size = int(float(match.group(1)) * _UNITS[unit])
    if size < at_least:
        raise ValueError(f"`{name}` is {value!r}; it must be {'more than 0' if at_least else '0 or more'} bytes.")
    return size


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Switches of the kernels. A component that is on is applied only where it is proved equal to the original.

    Args:
        attention: Causal attention without masks: windows, packed and padded rows, soft-caps, sinks.
        recurrence: Layers that mix tokens by a recurrence: gated delta rule, Mamba2, decayed attention.
        short_conv: Layers that mix tokens by a short convolution alone.
        rope: Rotary position embedding.
        latent: Keys and values of latent attention (MLA) in one pass, and, with `rope`, its queries rotated in one.
        rms_norm: RMSNorm in all its variants, also with a gate.
        layer_norm: ``nn.LayerNorm``, and LayerNorm as models write it.
        swiglu: Gated MLPs with SiLU.
        geglu: Gated MLPs with GELU.
        relu_squared: MLPs with a squared ReLU.
        lora: PEFT's LoRA layers on plain linear layers, alone and in gated MLPs.
        router: Routers of mixture-of-experts layers, after their logits.
        experts: Mixtures of experts whose weights are stacked; others are lists of gated MLPs, see `swiglu`.
        load_balancing_loss: The auxiliary loss of a mixture of experts, if `output_router_logits` is set.
        cross_entropy: Cross entropy on logits; used for the head when `linear_cross_entropy` is off.
        linear_cross_entropy: The LM head fused with its cross entropy, so that the logits are never all built.
        recompute_mlp: Whether gated MLPs recompute the product of gate and up in the backward pass instead of saving
            it: a third less memory, and one pass less over it if layers are checkpointed. Without it, the down
            projection is called as a module, which saves its input.
        tiled_mlp: Whether gated MLPs run in tiles of tokens and save only their input, so that their other memory does
            not grow with the sequence. Costs one more forward pass of the MLP, except in a checkpointed layer that ends
            with its MLP (see `liger_trainer/tiling/tiled_mlp.py`).
        global_load_balancing: Whether the auxiliary loss counts the experts' tokens over all processes, so that a batch
            is balanced as a whole, not each process's part of it (`parallel/router_losses.py`). One all-reduce of
            one number per expert in each forward pass with a gradient, which all processes must run. Needs
            `load_balancing_loss`.
        logits_memory: Bytes of one chunk of logits in the fused head, an int or a string like ``"512MiB"``.
        fp8: The mode in which the decoder's linear layers multiply in fp8, ``"rowwise"``, ``"rowwise_gw_hp"`` or
            ``"tensorwise"``, or None for the dtype of the model; see `kernels/fp8/modes.py`.
        fp8_all_layers: Whether `fp8` is for the first and the last layer of the decoder too.
    """

    attention: bool = True
    recurrence: bool = True
    short_conv: bool = True
    rope: bool = True
    latent: bool = True
    rms_norm: bool = True
    layer_norm: bool = True
    swiglu: bool = True
    geglu: bool = True
    relu_squared: bool = True
    lora: bool = True
    router: bool = True
    experts: bool = True
    load_balancing_loss: bool = True
    cross_entropy: bool = True
    linear_cross_entropy: bool = True
    recompute_mlp: bool = True
    tiled_mlp: bool = False
    global_load_balancing: bool = False
    logits_memory: int | str = DEFAULT_LOGITS_MEMORY
    fp8: Fp8Mode | None = None
    fp8_all_layers: bool = False

    def __post_init__(self) -> None:
        for name in (*KERNEL_KEYS, "recompute_mlp", "tiled_mlp", "global_load_balancing", "fp8_all_layers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"`liger_kernel_config[{name!r}]` is {getattr(self, name)!r}; it must be true or false."
                )
        if self.global_load_balancing and not self.load_balancing_loss:
            raise ValueError(
                "`liger_kernel_config['global_load_balancing']` is True, but `load_balancing_loss`, the kernel that "
                "sums over all processes, is False. Switch it on, or leave `global_load_balancing` out."
            )
        if self.fp8 not in (None, *get_args(Fp8Mode)):
            raise ValueError(f"`fp8` is {self.fp8!r}; it must be {', '.join(map(repr, get_args(Fp8Mode)))} or null.")
        if self.fp8_all_layers and self.fp8 is None:
            raise ValueError(
                "`liger_kernel_config['fp8_all_layers']` is True, but `fp8` is null. Set `fp8`, or leave "
                "`fp8_all_layers` out."
            )
        if self.fp8 is not None and self.tiled_mlp:
            raise ValueError(
                f"`fp8` is {self.fp8!r} and `liger_kernel_config['tiled_mlp']` is True, but MLPs in tiles multiply in "
                "the model's dtype. Leave one of the two out."
            )
        object.__setattr__(self, "logits_memory", parse_bytes(self.logits_memory))

    @classmethod
    def parse(cls, value: KernelConfig | Mapping[str, Any] | str | None, **overrides: Any) -> KernelConfig:
        """A config from what users write: nothing, a mapping, or a JSON object in a string.

        Raises:
            ValueError: for text that is not a JSON object, an unknown key (the nearest valid key is named) or a value
                of the wrong type.
        """
        if isinstance(value, cls):
            return dataclasses.replace(value, **overrides)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"`liger_kernel_config` is {value!r}, which is not JSON: {error}.") from error
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"`liger_kernel_config` is {value!r}; give a mapping such as {{'rope': false}}.")
        values = {_ALIASES.get(key, key): item for key, item in (value or {}).items()}
        valid = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in valid:
                near = difflib.get_close_matches(str(key).lower(), valid, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(f"`liger_kernel_config` has no key {key!r}{hint} The keys are {', '.join(valid)}.")
        return cls(**{**values, **overrides})


_OPTIONS = (  # how, not which
    *("recompute_mlp", "tiled_mlp", "global_load_balancing", "logits_memory"),
    *("fp8", "fp8_all_layers"),
)
KERNEL_KEYS = tuple(field.name for field in dataclasses.fields(KernelConfig) if field.name not in _OPTIONS)
