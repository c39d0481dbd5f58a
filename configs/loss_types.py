"""Loss types: those of GRPO as a table, and whether a configuration's is one that TRL states."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from typing import Any, Literal, NamedTuple

from liger_trainer.compat.private import installed_version

logger = logging.getLogger("liger_trainer")


class PolicyLossType(NamedTuple):
    """A loss type of GRPO, apart from its formula (`liger_trainer/liger/operators/grpo_loss.py`)."""

    # The divisor of the sum of the token losses.
    divided_by: Literal["completion", "completions", "longest completion", "micro-batch", "step"]
    clips_ratio: bool  # whether it clips the ratio to the old policy, on one side or two, by tokens or by sequences
    couples_tokens: bool = False  # whether the loss of a token depends on the other tokens of its completion


POLICY_LOSS_TYPES = {
    "grpo": PolicyLossType("completion", True),
    "dapo": PolicyLossType("step", True),
    "bnpo": PolicyLossType("micro-batch", True),
    "dr_grpo": PolicyLossType("longest completion", True),
    "luspo": PolicyLossType("completions", True),
    "cispo": PolicyLossType("step", False),
    "sapo": PolicyLossType("completion", False),
    "vespo": PolicyLossType("step", False, couples_tokens=True),
}
"""The loss types of GRPO that we know; TRL may have others, whose completions then stay where TRL has put them."""


def divided_by(loss_type: str | None) -> str:
    """What divides the sum of the token losses of a loss type of GRPO; empty for a type that is not known."""
    known = POLICY_LOSS_TYPES.get(loss_type or "")
    return "" if known is None else known.divided_by


@functools.cache
def known_loss_types(config_class: Any) -> list[str]:
    """The loss types of a TRL configuration: its field's `choices`, or those that its help lists.

    They are TRL's to add to, so this package has no list of them. Empty where there is no `loss_type`; where
    the field states no types, a warning says so, once.
    """
    field = {field.name: field for field in dataclasses.fields(config_class)}.get("loss_type")
    if field is None:
        return []
    stated = re.search(r"values are:? (.*?)\.(\s|$)", field.metadata.get("help", ""))
    known = list(field.metadata.get("choices") or re.findall(r"'(\w+)'", stated.group(1) if stated else ""))
    if not known:
        logger.warning(
            "trl %s: the field `loss_type` of %s does not list its values, so liger_trainer does not check them; TRL "
            "does, in the first step.",
            *(installed_version("trl"), config_class.__name__),
        )
    return known


def check_loss_type(args: Any) -> None:
    """Checks `args.loss_type`, which TRL checks in the first step, long after the data are prepared."""
    config_class: Any = type(args)
    known = known_loss_types(config_class)
    given = getattr(args, "loss_type", None)
    for loss_type in given if isinstance(given, list) else [given]:
        if known and loss_type not in known:
            raise ValueError(f"`loss_type` is {loss_type!r}; it must be one of {', '.join(map(repr, known))}.")
