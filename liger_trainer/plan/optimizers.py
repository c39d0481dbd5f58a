"""Memory of optimizer states, by the Trainer's ``optim``."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from liger_trainer.configs.liger_adamw import LIGER_ADAMW, liger_adamw_options
from liger_trainer.kernels.optim.block_codes import BLOCK
from liger_trainer.plan.parameters import Parameters

_IN_DTYPE = {  # number of states that torch keeps in the parameter's own dtype
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adamw_torch_xla": 2,
    "adamw_apex_fused": 2,
    "adamw_anyprecision": 2,
    "stable_adamw": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
}
_FIXED = {  # bytes per element for any dtype: bitsandbytes and torchao quantise states or keep them in fp32
    "adamw_bnb_8bit": 2.0,
    "adamw_8bit": 2.0,
    "ademamix_8bit": 3.0,
    "rmsprop_bnb_8bit": 1.0,
    "lion_8bit": 1.0,
    "adamw_torch_8bit": 2.0,
    "adamw_torch_4bit": 1.0,
    "adamw": 8.0,
    "ademamix": 12.0,
    "lion": 4.0,
    "lion_32bit": 4.0,
    "ademamix_32bit": 12.0,
    "adamw_32bit": 8.0,
    "rmsprop_bnb": 4.0,
    "rmsprop_bnb_32bit": 4.0,
}
_UNKNOWN = 8.0
_FOREACH = {"adamw_torch": 1, "rmsprop": 1, "adagrad": 1}  # temporaries of a step over all parameters at once


@dataclasses.dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of the states, and of the temporaries of one step."""

    states: float
    step: float


def is_known(optim: str) -> bool:
    """Whether the states of `optim` are known, not assumed."""
    name = optim.removeprefix("paged_")
    return name in ("adafactor", LIGER_ADAMW) or name in _IN_DTYPE or name in _FIXED


def optimizer_memory(
    optim: str, parameters: Parameters, trained_bytes: float | None = None, optim_args: str = ""
) -> OptimizerMemory:
    """The memory of an optimizer over all trained parameters.

    torch's optimizers keep each state in the dtype of its parameter: AdamW takes 8 bytes for an fp32 element and 4 for
    a bf16 element. Adafactor keeps rows and columns of a matrix in fp32, and needs two fp32 copies of the current
    matrix. Pages that a paged optimizer moves to the host are counted as if they had stayed.

    `liger_adamw` keeps a remainder of 2 bytes for a bf16 element (unless ``master`` is another one), and moments as
    its ``states`` say: 2.03 bytes in blocks of 8 bits, 8 where a weight has no whole blocks. For an fp32 element it is
    torch's AdamW.
    """
    total = parameters.total
    size = total.trained_bytes if trained_bytes is None else trained_bytes
    name = optim.removeprefix("paged_")
    if name == "adafactor":
        return OptimizerMemory(4.0 * parameters.factored, 8.0 * parameters.largest)
    if name == LIGER_ADAMW:
        return OptimizerMemory(_liger_states(parameters, size, optim_args), 0.0)
    if name in _IN_DTYPE:
        return OptimizerMemory(_IN_DTYPE[name] * size, _FOREACH.get(name, 0) * size)
    return OptimizerMemory(_FIXED.get(name, _UNKNOWN) * total.trained, 0.0)


def _liger_states(parameters: Parameters, size: float, optim_args: str) -> float:
    options = {"states": "8bit", "master": "remainder"}
    options |= liger_adamw_options(SimpleNamespace(optim_args=optim_args, seed=0))
    trained = parameters.total.trained
    wide = size / 2 - trained  # elements in fp32; the others are in bf16
    half = trained - wide
    remainders = 2.0 * half if options["master"] == "remainder" else 0.0
    in_blocks = min(parameters.in_blocks, half) if options["states"] == "8bit" else 0
    others = 4.0 if options["states"] == "bf16" else 8.0
    return 8.0 * wide + remainders + (2 + 8 / BLOCK) * in_blocks + others * (half - in_blocks)
