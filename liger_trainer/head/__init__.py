"""The language-model head in training: logits that are never built.

- `step`, `forward`: what is known of the step that runs, what the forward of a model tells its head, and the forward of
  the head
- `lm_head`: finds the head; one call of it, and its weight when the loss needs it: plain, an FSDP2 shard (gathered so
  that its gradient is averaged over the ranks), a ZeRO-3 partition, PEFT's copies
- `deferred_logits`: the tensor without storage; `recorded` has the operations on it, and what it shares with
  the pending norms of `patching/norm_forwards.py`
- `recorded_ops`: the functions that leave logits deferred
- `vocab_functions`: functions over the vocabulary, one chunk of tokens at a time, and the padding of the Trainer
- `fused_loss`, `divergence`: losses by one operator, of one model or of a student and a teacher, over the rows that
  have a label; `labelled_rows` gathers these
- `chunked_module`, `vocab_parallel`: heads that are not plain linear layers or that ZeRO-3 has partitioned, and those
  whose rows tensor parallelism splits

`patching/head.py` proves the deferring head and binds it; `patching/model_forward.py` binds the model's forward.
"""

from liger_trainer.head import recorded_ops as _recorded_ops  # noqa: F401  (registers what stays deferred)
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.lm_head import find_lm_heads

__all__ = ["DeferredLogits", "find_lm_heads"]
