"""Losses of alignment and distillation over a head that is not applied before, with the call signatures of Liger's.

They are modules, called with the weight of the head and the hidden states before it; the logits never exist as a whole,
and the gradients of a head that is trained come with the forward in three matmuls. `liger_trainer.losses.functional`
has them as functions. The formulas by themselves are in `liger_trainer.liger.losses.preference_formulas`.

Arguments that only steer how Liger's losses work inside (`compiled`, `chunk_size`) are accepted and have no effect.
`logits_memory`, the last argument of the constructors, is ours.
"""

from liger_trainer.liger.losses.grpo import LigerFusedLinearGRPOLoss
from liger_trainer.liger.losses.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_trainer.nn import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSDLoss,
)

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]
