"""Checkpoints in 8 bits and fewer that load as something else, or whose layers pass no gradient.

The configuration of a checkpoint says how it was quantised. Training refuses the same, once the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.trap import Trap

_PLAIN = "`model_name_or_path:` the same model in 16 bits"


def low_bit_base(case: Case) -> list[Trap]:
    """A format that transformers does not know, quantised activations, and adapters on weights that stay codes."""
    settings = _settings(case.config)
    if settings is None:
        return []
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = settings.get("quant_method")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(str(getattr(method, "value", method)))
    if kind is None and not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        what = f"transformers does not know the checkpoint's `quant_method` {method!r}"
        return [Trap(f"{what}: it loads the codes as weights, without their scales", _PLAIN)]
    found = []
    if any(_quantises_activations(group) for group in (settings.get("config_groups") or {}).values()):
        found.append(
            Trap(
                "The checkpoint's linear layers quantise their inputs as well, and pass no gradient to the layers "
                "below them: adapters there train on wrong gradients, or not at all",
                f"{_PLAIN}, or in a script `quantization_config={_name(kind)}(dequantize=True)`",
            )
        )
    targets = case.values["use_peft"] and case.values.get("lora_target_parameters")
    if targets and "dequantize" in _parameters(kind):
        found.append(
            Trap(
                f"`lora_target_parameters` is {targets}, and the checkpoint is quantised ({method}): where its codes "
                "stay packed, as on a GPU, PEFT adds these adapters to the codes or makes none",
                f"`lora_target_parameters: null`, {_PLAIN}, or in a script "
                f"`quantization_config={_name(kind)}(dequantize=True)`",
            )
        )
    return found


def _settings(config: Any) -> Mapping[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def _quantises_activations(group: Any) -> bool:
    return isinstance(group, Mapping) and group.get("input_activations") is not None


def _parameters(kind: Any) -> tuple[str, ...]:
    code = getattr(getattr(kind, "__init__", None), "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", "...Config")
