"""Model FLOPs per token, and the peak FLOP/s of the hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Dense bf16/fp16 FLOP/s of the tensor cores from the vendors' data sheets (without structured sparsity), by a part of
# the device's name; the first match counts.
PEAK_FLOPS = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI355X": 2.5e15,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,
}


def peak_flops(device: torch.device, half_precision: bool) -> float | None:
    """Peak dense FLOP/s of `device` in bf16 or fp16; None if it is not known, as for CPUs and for fp32."""
    if device.type != "cuda" or not half_precision:
        return None
    name = torch.cuda.get_device_name(device)
    words = name.replace("-", " ").split()
    for part, flops in PEAK_FLOPS.items():
        if all(word in words for word in part.split()):
            return flops
    return None


def flops_per_token(model: nn.Module) -> float:
    """Floating point operations that one token costs in a training step.

    2 per weight in the forward, 2 in the backward for the gradient of the activations, and 2 more if the weight itself
    is trained: 6N for full fine-tuning, the usual count (Kaplan et al. 2020, appendix B), and 4N for the frozen weights
    under an adapter. N does not count the input embedding, which is a look-up (a tied one counts as the head), and
    counts only the share of a mixture of experts that a token is routed to. The attention scores and the recomputation
    of gradient checkpointing are not counted, so the utilisation computed from it is a lower bound if all tokens have
    labels. The LM head is counted for every token, although ours leaves out those without one.

    Args:
        model: The model before it is sharded.
    """
    share = _expert_share(model)
    embedding = _weight(model, "get_input_embeddings")
    tied = embedding is not None and embedding is _weight(model, "get_output_embeddings")
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and not tied:
            continue
        numel = getattr(parameter, "ds_numel", parameter.numel())
        active = numel * (share if ".experts." in f".{name}." else 1.0)
        total += active * (6 if parameter.requires_grad else 4)
    return total


def _expert_share(model: nn.Module) -> float:
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0


def _weight(model: nn.Module, getter: str) -> nn.Parameter | None:
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return getattr(module, "weight", None)
