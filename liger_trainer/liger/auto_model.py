"""`AutoModelForCausalLM` that applies the kernels to the models it builds."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from liger_trainer.configs.kernel_config import KERNEL_KEYS, KernelConfig
from liger_trainer.patching.apply import apply_liger_kernel

_KERNEL_KWARGS = (*KERNEL_KEYS, "fused_linear_cross_entropy", "recompute_mlp", "tiled_mlp", "logits_memory")


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` with kernel switches among its keyword arguments.

    Besides the arguments of `AutoModelForCausalLM`, both constructors take `strict` and the fields of
    [`liger_trainer.KernelConfig`] but `global_load_balancing`, with `fused_linear_cross_entropy` as another name of
    `linear_cross_entropy`; see [`liger_trainer.apply_liger_kernel`]. Remote code is trusted only if the caller passes
    `trust_remote_code=True`, as in transformers.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Loads a model, as `AutoModelForCausalLM.from_pretrained` does, and applies the kernels to it.

        Raises:
            ValueError: for a wrong kernel switch, or a kernel that cannot be applied with `strict=True`.
        """
        kernels, strict, kwargs = _split(kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
        apply_liger_kernel(model, kernels, strict=strict)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Builds a model with random weights, as `AutoModelForCausalLM.from_config` does, and applies the kernels.

        Raises:
            ValueError: for a wrong kernel switch, or a kernel that cannot be applied with `strict=True`.
        """
        kernels, strict, kwargs = _split(kwargs)
        model = super().from_config(config, **kwargs)
        apply_liger_kernel(model, kernels, strict=strict)
        return model


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    """(kernel switches, strict, the rest)."""
    kernels = {name: value for name, value in kwargs.items() if name in _KERNEL_KWARGS}
    KernelConfig.parse(kernels)  # a wrong switch is an error before the weights are loaded
    rest = {name: value for name, value in kwargs.items() if name not in (*_KERNEL_KWARGS, "strict")}
    return kernels, bool(kwargs.get("strict", False)), rest
