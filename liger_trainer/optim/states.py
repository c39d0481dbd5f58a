"""What `LigerAdamW` stores for a parameter, and how states of other formats become it.

A state has `step`, a number in fp32, and the moments `exp_avg` and `exp_avg_sq` in the shape of the parameter, as
`torch.optim.AdamW` has them. In 8 bits they are `exp_avg_codes` with `exp_avg_scales`, of shape (..., K / 256) for a
last dimension K, and the same of the second, so that no other optimizer takes codes for numbers. `remainder` is what a
bf16 weight lacks of an fp32 one: the bits of an int16 as bf16, since neither NCCL nor gloo sends int16. All but `step`
of a DTensor are DTensors with its placements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import PARTS_OF_FSDP1
from liger_trainer.kernels.optim.adamw import Moments
from liger_trainer.kernels.optim.block_codes import BLOCK, decode, encode
from liger_trainer.kernels.runtime import local_part

(is_fsdp_flattened,) = require(PARTS_OF_FSDP1)

State = dict[str, Any]

_LEAST_NUMEL = 4096
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the moments


def new_state(parameter: torch.Tensor, states: str, master: str | None) -> State:
    """The state of a parameter before its first step, all zeros."""
    state: State = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    if parameter.dtype != torch.bfloat16:
        return state | {name: torch.zeros_like(parameter) for name in _SIGNED}
    if states == "8bit" and has_whole_blocks(parameter):
        for name in _SIGNED:
            state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{name}_scales"] = _scales(parameter)
    else:
        dtype = torch.bfloat16 if states == "bf16" else torch.float32
        state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in _SIGNED}
    if master == "remainder":
        if is_fsdp_flattened(parameter) and not isinstance(parameter, FlatParameter) and states != "bf16":
            raise ValueError(
                "LigerAdamW has states of several dtypes for bf16 weights, which FSDP1 cannot save with "
                "`use_orig_params: true`. Use FSDP2 (`fsdp_version: 2`)."
            )
        state["remainder"] = torch.zeros_like(parameter)
    return state


def moments_of(state: State) -> Moments:
    """This process's part of the moments."""
    if "exp_avg" in state:
        return Moments(*(local_part(state[name]) for name in _SIGNED))
    return Moments(*(local_part(state[f"{name}_{part}"]) for part in ("codes", "scales") for name in _SIGNED))


def remainder_of(state: State) -> torch.Tensor | None:
    """This process's part of the remainder, int16; None if there is none."""
    return local_part(state["remainder"]).view(torch.int16) if "remainder" in state else None


@torch.no_grad()
def loaded_state(parameter: torch.Tensor, states: str, master: str | None, saved: State) -> State:
    """The state of a parameter with the values of `saved`, which may be stored in another format."""
    state = new_state(parameter, states, master)
    try:
        state["step"].fill_(float(saved["step"]))
        if not local_part(parameter).numel():
            return state
        for name, signed in _SIGNED.items():
            codes, scales = f"{name}_codes", f"{name}_scales"
            if name in saved and codes in saved:  # zeros that `torch.distributed.checkpoint` found here, and the state
                raise ValueError(
                    f"`states` is {states!r}, but the checkpoint of this sharded model has moments in another format. "
                    "Set `states` to what it was."
                )
            if codes not in state:
                _copy(state[name], _moment(saved, name))
            elif codes in saved:
                _copy(state[codes], saved[codes])
                _copy(state[scales], saved[scales])
            else:
                wide = torch.empty_like(local_part(parameter), dtype=torch.float32)
                _copy(wide, saved[name])
                for part, value in zip((codes, scales), encode(wide, signed)):
                    _copy(state[part], value)
    except KeyError as error:
        raise ValueError(f"The state that was to be loaded has no {error}, so it is not of an AdamW.") from None
    if "remainder" in state and "remainder" in saved:
        _copy(state["remainder"], saved["remainder"])
    return state


def adamw_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a `LigerAdamW` as `torch.optim.AdamW` loads it: with both moments in fp32.

    Remainders are left out; [`LigerAdamW.fp32_weight`] has the weights that they belong to.

    Args:
        state_dict: `LigerAdamW.state_dict()`, or what a Trainer saved as `optimizer.pt`. Tensors, not DTensors.

    Returns:
        A new dictionary. Moments that are not in 8 bits are the same tensors.
    """
    own = ("states", "master", "seed")
    return {
        "state": {
            key: {"step": state["step"], **{name: _moment(state, name) for name in _SIGNED}}
            for key, state in state_dict["state"].items()
        },
        "param_groups": [
            {key: value for key, value in group.items() if key not in own} for group in state_dict["param_groups"]
        ],
    }


def _moment(saved: State, name: str) -> torch.Tensor:
    if f"{name}_codes" not in saved:
        return local_part(saved[name])
    return decode(local_part(saved[f"{name}_codes"]), local_part(saved[f"{name}_scales"]), _SIGNED[name])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target, source = local_part(target), local_part(source)
    if target.shape != source.shape:
        shapes = f"of shape {tuple(source.shape)}, and the parameter's of shape {tuple(target.shape)}"
        raise ValueError(f"The state that was to be loaded is {shapes}.")
    target.copy_(source)


def has_whole_blocks(parameter: torch.Tensor) -> bool:
    """Whether the moments may be in 8 bits; the same on every process, and for every number of them."""
    if parameter.ndim < 2 or parameter.numel() < _LEAST_NUMEL or not local_part(parameter).is_contiguous():
        return False
    parts = 1  # of the last dimension
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape):
            if placement.is_shard(parameter.ndim - 1):
                parts *= size
    return parameter.shape[-1] % (BLOCK * parts) == 0


def _scales(parameter: torch.Tensor) -> torch.Tensor:
    part = local_part(parameter)
    scales = torch.zeros(*part.shape[:-1], part.shape[-1] // BLOCK, dtype=torch.float32, device=part.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
