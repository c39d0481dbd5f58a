"""The language-model head in training: logits that are never built."""

from liger_trainer.head import recorded_ops as _recorded_ops  # noqa: F401  (registers what stays deferred)
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.lm_head import find_lm_heads

__all__ = ["DeferredLogits", "find_lm_heads"]
