"""Half-precision weights at a rate at which rounding loses most of Adam's updates."""

from __future__ import annotations

from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.trap import Trap
from liger_trainer.tools.planning.inputs import rounded_updates


def rounded(case: Case) -> list[Trap]:
    """Asks the estimate of ``liger-trainer plan``; an `accelerate_config` is taken to be launched on several GPUs."""
    _, dtype = case.model_and_dtype
    found = rounded_updates(case.values, case.config, dtype, gpus=2)
    return [] if found is None else [Trap(f"{found[0]}, while the loss looks healthy", found[1])]
