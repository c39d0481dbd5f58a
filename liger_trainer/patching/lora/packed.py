"""Adapters on packed weights: what PEFT must not do with them.

It would read or change floating weights, which packed modules have not (`packed/modules.py`, `packed/experts.py`). Each
module says so where it is read; here, a model says so before the first of its adapters is merged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from liger_trainer.compat.peft import ADAPTERS_ON_FOUR_BITS
from liger_trainer.compat.private import require
from liger_trainer.packed.experts import OURS_ALONE, PackedExperts, packed_stacks
from liger_trainer.packed.modules import PackedLinear


def refuse_what_reads_weights(model: nn.Module) -> None:
    """Makes PEFT say why it cannot merge adapters on packed weights, nor run those on experts in its own forward.

    Adapters on weights in 16 bits alone may be merged into these.
    """
    if not any(map(_is_adapted_and_packed, model.modules())):
        return
    BaseTuner, ParamWrapper, *_ = require(ADAPTERS_ON_FOUR_BITS)
    for module in model.modules():
        if isinstance(module, BaseTuner):
            module._check_merge_allowed = _refuse_to_merge
        if isinstance(module, ParamWrapper) and packed_stacks(module.get_base_layer()):
            module._activate_lora = _refuse_to_activate


def _is_adapted_and_packed(module: nn.Module) -> bool:
    base = module._modules.get("base_layer")
    return isinstance(base, PackedLinear | PackedExperts)


def _refuse_to_merge(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "Adapters cannot be merged into a packed base: merging needs its floating weights. Save them, and merge with "
        "`liger-trainer merge`; or load them with `PeftModel.from_pretrained` on the dequantised model and merge there."
    )


def _refuse_to_activate(active_adapters: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    if active_adapters:
        raise RuntimeError(OURS_ALONE)
    return contextlib.nullcontext()
