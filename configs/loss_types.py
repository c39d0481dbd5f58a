"""Loss types as TRL's configurations state them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any


def known_loss_types(config_class: Any) -> list[str]:
    """The loss types of a TRL configuration: its field's `choices`, or what its help lists; none where it states none.

    They are TRL's to add to, so there is no list of them here.
    """
    field = {field.name: field for field in dataclasses.fields(config_class)}.get("loss_type")
    if field is None:
        return []
    stated = re.search(r"values are:? (.*?)\.(\s|$)", field.metadata.get("help", ""))
    return list(field.metadata.get("choices") or re.findall(r"'(\w+)'", stated.group(1) if stated else ""))


def check_loss_type(args: Any) -> None:
    """Checks `args.loss_type`, which TRL looks at in the first step, where the data are long prepared.

    Raises:
        ValueError: for a loss type that TRL does not state, naming those it does.
    """
    known = known_loss_types(type(args))
    given = getattr(args, "loss_type", None)
    for loss_type in given if isinstance(given, list) else [given]:
        if known and loss_type not in known:
            raise ValueError(f"`loss_type` is {loss_type!r}; it must be one of {', '.join(map(repr, known))}.")
