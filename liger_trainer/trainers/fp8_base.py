"""`fp8_base` in a trainer: where it is refused, and the conversion."""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_trainer.head.lm_head import without_adapters
from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.patching.lora.fp8_base import store_base_in_fp8
from liger_trainer.patching.report import KernelReportRow


def store_base(trainer: Any, model: nn.Module) -> tuple[KernelReportRow, ...]:
    """Stores the base of `model` in fp8 on the trainer's device; see `store_base_in_fp8`.

    Raises:
        ValueError: If that cannot be: without LoRA adapters, with a quantised base, where the launch splits the model,
            with vLLM, or on a device without matmuls in fp8.
    """
    given, device = "`fp8_base` is true, but", trainer.args.device
    if not has_fp8(device):
        raise ValueError(
            f"{given} {device.type} has no fp8 matmuls with a scale for each row, which NVIDIA's Hopper and newer "
            "have. Set it to false; `load_in_4bit` needs even less memory."
        )
    _check_model(given, model)
    _check_launch(given, trainer, model)
    return store_base_in_fp8(model, device)


def _check_model(given: str, model: Any) -> None:
    kinds = {str(getattr(one.peft_type, "value", one.peft_type)) for one in getattr(model, "peft_config", {}).values()}
    if kinds != {"LORA"}:
        has = f"adapters of the kind {', '.join(sorted(kinds))}" if kinds else "no adapters, and trains its weights"
        raise ValueError(f"{given} the model has {has}. Give it LoRA adapters (`peft_config`, `use_peft`).")
    base: Any = without_adapters(model)
    if getattr(base, "is_quantized", False):
        raise ValueError(
            f"{given} the model is quantised already (`load_in_4bit`, `quantization_config`). Leave one of them out."
        )


def _check_launch(given: str, trainer: Any, model: Any) -> None:
    split = trainer.get_tp_size() > 1 or (getattr(without_adapters(model), "tp_size", None) or 1) > 1
    ways = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "`distributed_config`": trainer.is_distributed_loading_by_transformers,
        "tensor parallelism": split,
    }
    way = next((way for way, used in ways.items() if used), None)
    if way is not None:
        raise ValueError(
            f"{given} {way} splits the model, which weights in fp8 do not support. Launch it on one GPU, or with "
            "`--accelerate_config ddp`."
        )
    if getattr(trainer.args, "use_vllm", False):
        raise ValueError(
            f"{given} vLLM gets the adapters merged into their base (`use_vllm`), which is not possible in fp8. Set "
            "one of the two to false."
        )
