"""What an adapter's own files leave out: how the base that it was trained on was quantised."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from liger_trainer.patching.moe.quantized_experts import four_bits

FILE = "base_quantization.json"
"""Beside ``adapter_config.json``."""


@dataclasses.dataclass(frozen=True)
class BaseQuantization:
    """How a base model was quantised."""

    # The keys of transformers' ``quantization_config``; None if only experts were quantised.
    config: dict[str, Any] | None
    dtype: str  # the dtype that the model was loaded in, such as ``"bfloat16"``
    # ``quant_type`` and ``double_quant`` of `quantize_experts`; None if experts were not quantised so.
    experts: dict[str, Any] | None = None


def write_base_quantization(model: nn.Module, folder: Path) -> None:
    """Writes `FILE` into a folder with the adapters of `model`, if its base is quantised."""
    if not isinstance(model, PeftModel):
        return
    base: Any = model.get_base_model()
    config = getattr(base.config, "quantization_config", None)
    weight = next((one for module in base.modules() for one in four_bits(module).values()), None)
    if config is None and weight is None:
        return
    experts = None
    if weight is not None:
        experts = {"quant_type": weight.quant_type, "double_quant": weight.nested_blocksize > 0}
    found = BaseQuantization(
        config=None if config is None else config if isinstance(config, dict) else config.to_dict(),
        dtype=str(base.config.dtype).removeprefix("torch."),
        experts=experts,
    )
    text = json.dumps(dataclasses.asdict(found), indent=2, default=str)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_base_quantization(folder: Path) -> BaseQuantization | None:
    """What `write_base_quantization` has written into `folder`; None if it has written nothing."""
    path = folder / FILE
    return BaseQuantization(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
