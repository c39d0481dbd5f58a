"""Mixture-of-experts layers, which stay with transformers' own grouped matmul."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from liger_trainer.patching.finding import Finding
from liger_trainer.patching.probe import full_shape


def find_experts(module: nn.Module, enabled: Callable[[str], bool]) -> Finding | None:
    """The verdict on `module` if it holds the 3-D weights of a layer of experts, else None."""
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if any(weight is None or len(full_shape(weight)) != 3 for weight in weights):
        return None
    target = type(module).__name__
    if not enabled("experts"):
        return Finding("experts", target, module, reason="switched off in liger_kernel_config")
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(type(module), "_apply_gate") or implementation is None:
        return Finding("experts", target, module, reason="no kernel of ours yet; the model's own code runs")
    if implementation == "grouped_mm":
        return Finding(
            "experts",
            target,
            module,
            reason="no kernel of ours yet; transformers' own grouped matmul (grouped_mm) runs",
        )
    reason = f"no kernel of ours yet; transformers' own {implementation!r} implementation runs"
    return Finding("experts", target, module, reason=reason)
