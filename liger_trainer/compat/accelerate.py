"""Private names of accelerate."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

WRAPPED_OPTIMIZER = Feature(
    "leaving out updates that are not finite",
    (Private("accelerate.optimizer:AcceleratedOptimizer.__init__", uses=("optimizer", "scaler")),),
)
