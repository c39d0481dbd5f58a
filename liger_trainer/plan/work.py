"""What is trained, as a plan sees it: the model, and the work of one micro-batch."""

from __future__ import annotations

import dataclasses

from liger_trainer.plan.head import HeadSettings
from liger_trainer.plan.parameters import Parameters
from liger_trainer.plan.shapes import LayerShape


@dataclasses.dataclass(frozen=True)
class Work:
    """What a trainer does with one micro-batch, apart from its size.

    Args:
        rows: Sequences per unit of batch size: 2 for the trainers of pairs.
        length: Tokens in a sequence.
        loss_length: How many of these have a loss.
        head: How the LM head runs.
        reference_bytes: Bytes of a reference model's weights; 0 for none.
        generated: Sequences that each GPU generates at once with ``generate``, for a micro-batch of one sample; 0 for
            none.
        all_micro_batches: Whether the sequences of all accumulation steps are generated together.
        reserved_fraction: Fraction of the GPU that vLLM takes for itself.
    """

    rows: int = 1
    length: int = 1024
    loss_length: int = 1024
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    reference_bytes: float = 0.0
    generated: int = 0
    all_micro_batches: bool = True
    reserved_fraction: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its training: everything that a `Setting` leaves open.

    Args:
        parameters: The model's parameter counts.
        shape: The shape of its largest layer.
        work: The work of a micro-batch.
        weight_bytes: Bytes per element of the trained weights as they are loaded; adapters are always fp32.
        mixed: Whether bf16 or fp16 autocast is on.
        optim: The Trainer's ``optim``.
        optim_args: The Trainer's ``optim_args``.
        implementation: The attention implementation, as in ``attn_implementation``; ``"liger_trainer"`` is ours.
        recompute_mlp: Whether gated MLPs recompute their product in the backward pass.
        checkpoint_every: With checkpointing, one layer out of this many is checkpointed.
        sync_each_batch: Whether gradients are reduced after every micro-batch instead of once per step.
    """

    parameters: Parameters
    shape: LayerShape
    work: Work
    weight_bytes: int = 2
    mixed: bool = True
    optim: str = "adamw_torch_fused"
    optim_args: str = ""
    implementation: str = "sdpa"
    recompute_mlp: bool = False
    checkpoint_every: int = 1
    sync_each_batch: bool = False
