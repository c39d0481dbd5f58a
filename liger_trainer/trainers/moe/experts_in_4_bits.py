"""What a trainer refuses of a model whose experts are in 4 bits (`quantize_experts`)."""

from __future__ import annotations

from typing import Any

from liger_trainer.patching.moe.quantized_experts import check_adapted, four_bits


def check_experts_in_4_bits(trainer: Any) -> None:
    """Checks that every adapter exists for the weights that it names, and that the launch does not split the model."""
    if not any(four_bits(module) for module in trainer.model.modules()):
        return
    check_adapted(trainer.model)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        way = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise ValueError(
            f"`model` has experts in 4 bits, which cannot be split, and the launch splits it with {way}. Launch it on "
            "one GPU, or with `--accelerate_config ddp`."
        )
