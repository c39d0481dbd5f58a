"""Sampling from another distribution than the one whose probabilities the loss takes."""

from __future__ import annotations

from types import SimpleNamespace

from liger_trainer.recipe.schema import mapping
from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.trap import Trap
from liger_trainer.trainers.checks.trl_arguments import truncated_sampling


def sampling(case: Case) -> list[Trap]:
    """Truncation against importance ratios over the whole vocabulary, and a temperature that the loss does not know."""
    if not case.kind.generates:
        return []
    options = mapping("generation_kwargs", case.values["generation_kwargs"]) or {}
    found = truncated_sampling(SimpleNamespace(**{**case.values, "generation_kwargs": options}))
    traps = [] if found is None else [Trap(*found)]
    own, given = case.values["temperature"], options.get("temperature")
    if given is not None and given != own:
        what = f"`generation_kwargs` samples at `temperature` {given}, but the loss divides the logits by {own}"
        traps.append(Trap(f"{what}: it takes probabilities of another policy", f"`temperature: {given}`"))
    return traps
