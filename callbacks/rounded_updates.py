"""Warns of a learning rate so low that half-precision weights cannot represent its updates."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.compat.accelerate import WRAPPED_OPTIMIZER
from liger_trainer.compat.private import require
from liger_trainer.kernels.runtime import local_part
from liger_trainer.optim.adamw import LigerAdamW

logger = logging.getLogger("liger_trainer")

require(WRAPPED_OPTIMIZER)

SAMPLE = 2**20
"""About how many weights are sampled."""

LEAST_SHARE = 0.5
"""Warn if a smaller share of the weights can change."""


class RoundedUpdatesCallback(TrainerCallback):
    """Warns once, on the main process, if rounding would lose Adam's updates of most weights.

    An update of Adam is at most about as large as the learning rate. A weight in bf16 has 8 significant bits: in the
    binade [2^e, 2^(e + 1)) neighbouring numbers are 2^(e - 7) apart, and an update below half of that is rounded away.
    So a learning rate r changes only weights below about 2^8 r to 2^9 r. For r = 5e-7 that is 1 % of weights with a
    standard deviation of 0.02. This is an upper bound: the updates of a noisy gradient are smaller than r.

    `LigerAdamW` rounds weights in bf16 only with `master=None`.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Checks what the optimizer is going to update: all weights, adapters, or this process's shards."""
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if not state.is_world_process_zero:
            return
        groups = _rounded(inner)
        dtypes = {weight.dtype for group in groups for weight in group["params"]}
        dtype = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        rate = max(map(_rate, groups), default=0.0)
        if dtype.itemsize > 2 or not rate:
            return
        share = changed_share(groups)
        if share is None or share >= LEAST_SHARE:
            return
        ours = "without `master=none`" if isinstance(inner, LigerAdamW) else "which trains bf16 weights as fp32 weights"
        logger.warning(
            "Adam at `learning_rate` %g changes at most %.1f %% of the trained weights, which are in %s: updates of "
            "the others are rounded away. %s fp32 weights (`dtype: float32` with `bf16: true`) or adapters "
            "(`use_peft: true`).",
            *(rate, 100 * share, str(dtype).removeprefix("torch.")),
            f"Set `optim: liger_adamw`, {ours}, or train" if dtype == torch.bfloat16 else "Train",
        )


def _rounded(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups with the weights that are rounded as torch's Adam rounds them.

    None for classes that are no Adam, or may save what is rounded away, such as DeepSpeed's.
    """
    if isinstance(optimizer, LigerAdamW):
        return [
            {**group, "params": [weight for weight in group["params"] if weight.dtype != torch.bfloat16]}
            if group["master"]
            else group
            for group in optimizer.param_groups
        ]
    kind = type(optimizer)
    adam = kind in (torch.optim.Adam, torch.optim.AdamW) or kind.__module__.startswith("bitsandbytes.optim.adam")
    return optimizer.param_groups if adam else []


def _rate(group: dict[str, Any]) -> float:
    """The highest learning rate of a group, which a warmup has set to 0 before the first step."""
    return float(group.get("initial_lr", group["lr"]))


def expected_share(rate: float, std: float, dtype: torch.dtype) -> float:
    """The share of [`changed_share`], of normally distributed weights.

    With s the distance of neighbouring numbers in [1, 2), an update r changes the weights in [2^e, 2^(e + 1)) if it is
    above 2^e s / 2, so those with a magnitude below the first power of two that is no less than 2 r / s:

        share = erf(2^ceil(log2(2 r / s)) / (sqrt(2) std))
    """
    least = 2.0 ** math.ceil(math.log2(2 * rate / torch.finfo(dtype).eps))
    return math.erf(least / (math.sqrt(2) * std))


@torch.no_grad()
def changed_share(groups: list[dict[str, Any]]) -> float | None:
    """The share of weights that an update as large as the learning rate changes, in at least one direction.

    It is exact for a sample that is spread evenly over all weights of this process. None if there are no weights.
    """
    weights = [(local_part(weight), _rate(group)) for group in groups for weight in group["params"]]
    stride = max(sum(weight.numel() for weight, _ in weights) // SAMPLE, 1)
    looked_at = changed = 0
    for weight, rate in weights:
        sample = weight.reshape(-1)[::stride]
        wide = sample.float()
        differs = ((wide + rate).to(sample.dtype) != sample) | ((wide - rate).to(sample.dtype) != sample)
        looked_at += sample.numel()
        changed += int(differs.sum())
    return changed / looked_at if looked_at else None
