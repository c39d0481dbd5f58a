"""Gradient checkpointing that keeps what a budget of memory allows, instead of recomputing it.

1. Record (`recording`, the second step): what each layer could keep, and the memory that the step takes.
2. Choose (`budget`): the results that save most time for their bytes, within what the device has left.
3. Prove (`keeping`, the third step): what was chosen is kept and computed again, and both are compared bit for bit.
   What differs, because a hidden kernel writes to it or a weight is cast in between, is never kept.
4. Keep (`activation_memory`, from the fourth step on). A peak near the limit lowers it.

`keeping` also replaces the function with which transformers, or FSDP, checkpoints a layer. Record, limit and proof are
gathered from all processes. Checkpoints of a run hold record and proof (`trainers/activation_memory.py`), for a run
that goes on with the same versions on the same device.
"""
