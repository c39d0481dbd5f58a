"""What PEFT must not do with adapters on weights that are held as codes: merge them, or run them in its own forward.

It would read or change floating weights, which such modules do not have (`packed/modules.py`, `packed/experts.py`,
`patching/moe/quantized_experts.py`). Packed modules say so where their weights are read; here, a model says so before
the first of its adapters is merged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import nn

from liger_trainer.compat.peft import ADAPTERS_ON_FOUR_BITS
from liger_trainer.compat.private import require
from liger_trainer.packed.experts import OURS_ALONE, PackedExperts, packed_stacks
from liger_trainer.packed.modules import PackedLinear

_NOT_INTO_PACKED = (
    "Adapters cannot be merged into a packed base: merging needs its floating weights. Save them, and merge with "
    "`liger-trainer merge`; or load them with `PeftModel.from_pretrained` on the dequantised model and merge there."
)


def refuse_what_reads_weights(model: nn.Module) -> None:
    """Makes PEFT say why it cannot merge adapters on packed weights, nor run those on experts in its own forward.

    Adapters on weights in 16 bits alone may be merged into these.
    """
    if any(map(_is_adapted_and_packed, model.modules())):
        leave_adapters_to_us(model, packed_stacks, _NOT_INTO_PACKED, OURS_ALONE)


def leave_adapters_to_us(model: nn.Module, holds_codes: Callable[[Any], Any], merging: str, running: str) -> None:
    """Makes PEFT raise, for this model, where it would merge adapters, or run those on experts that hold codes.

    Args:
        model: The model with its adapters.
        holds_codes: Whether experts, the base layer of a `ParamWrapper`, hold codes.
        merging: The error where adapters are merged.
        running: The error where PEFT runs adapters on such experts in its own forward.
    """
    BaseTuner, ParamWrapper, *_ = require(ADAPTERS_ON_FOUR_BITS)
    for module in model.modules():
        if isinstance(module, BaseTuner):
            module._check_merge_allowed = functools.partial(_refuse_to_merge, merging)
        if isinstance(module, ParamWrapper) and holds_codes(module.get_base_layer()):
            module._activate_lora = functools.partial(_refuse_to_activate, running)


def _is_adapted_and_packed(module: nn.Module) -> bool:
    base = module._modules.get("base_layer")
    return isinstance(base, PackedLinear | PackedExperts)


def _refuse_to_merge(reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(reason)


def _refuse_to_activate(reason: str, active_adapters: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    if active_adapters:
        raise RuntimeError(reason)
    return contextlib.nullcontext()
