"""Checkpointing a layer but for the results of some calls of operators."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from liger_trainer.recompute.budget import Call

_Contexts = tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]


def keeping_contexts(calls: frozenset[Call]) -> _Contexts:
    """The contexts of the forward and of the recomputation of one layer, for `torch.utils.checkpoint.checkpoint`.

    Args:
        calls: Whose results the forward keeps and the recomputation takes from it. None of them may draw random
            numbers: those of later calls would be others in the recomputation.
    """
    seen: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    operators = {call.operator for call in calls}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator_name(operator)
        if name not in operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        count = seen[context.is_recompute]  # torch 2.11 asks in the recomputation too
        count[name] += 1
        keep = Call(name, count[name] - 1) in calls
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def operator_name(operator: Any) -> str:
    """The operator as ``namespace::name.overload``."""
    return operator.name()
