"""What is trained, as a plan sees it: the model, the work of one micro-batch, and the memory of its head.

The fused head with vocabulary V over N hidden states of size H holds one chunk of logits (`logits_memory`, or N V
elements if that is less). Cross entropy computes both gradients in the forward pass: dX (N H) and, for a trained head,
dW (V H). Losses of log-probabilities compute dX and dW in the backward pass; for a frozen head, the forward pass saves
the gradient of each log-probability with respect to its hidden state, (N, H) in fp32, from which the backward pass
computes dX. Logits that are saved for backward (`retain_logits_memory`) are added to a chunk.

Without the fused head, all logits are built: 12 bytes each in half precision (the logits, their fp32 copy, and both
gradients), or twice their size (the logits and their gradient) if the cross entropy is a kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from liger_trainer.configs.flags import kernel_config_of, retained_bytes_of
from liger_trainer.plan.parameters import Parameters
from liger_trainer.plan.shapes import LayerShape

UNFUSED_BYTES = 12  # peak per logit in eager cross entropy: half precision, fp32, fp32, half precision


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """How the head runs."""

    loss: str = "cross_entropy"  # ``"cross_entropy"``, ``"log_probs"``, or ``"none"`` for a model without an LM head
    fused: bool = True  # whether the fused head runs
    cross_entropy: bool = True  # without the fused head, whether the cross entropy on all logits is a kernel
    logits_memory: int = 512 * 2**20  # bytes of one chunk of logits
    # Bytes of logits that may be saved for backward; None for one chunk, which is the working chunk itself.
    retained: int | None = None

    @classmethod
    def of(cls, arguments: Any, loss: str) -> HeadSettings:
        """Those of training arguments, or of a namespace with a recipe's keys."""
        kernels, ours = kernel_config_of(arguments), arguments.use_liger_kernel
        return cls(
            loss,
            fused=bool(ours and kernels.linear_cross_entropy),
            cross_entropy=bool(ours and kernels.cross_entropy),
            logits_memory=int(kernels.logits_memory),
            retained=retained_bytes_of(arguments),
        )


@dataclasses.dataclass(frozen=True)
class HeadMemory:
    """Bytes of the head: its peak, and the weight gradient that remains when the layers' backward begins."""

    peak: float
    weight_gradient: float


def head_memory(
    settings: HeadSettings, tokens: int, hidden: int, vocab: int, compute: int, weight: int, trained: bool
) -> HeadMemory:
    """The memory of the head for N `tokens` with a loss.

    `compute` is the bytes of a hidden state and of a logit, `weight` those of an element of the weight's gradient.
    """
    if settings.loss == "none":
        return HeadMemory(0.0, 0.0)
    gradient = vocab * hidden * weight if trained else 0
    states = 2 * tokens * hidden * compute  # the last norm's output, and its gradient
    logits = tokens * vocab * compute
    if not settings.fused:
        whole = 2 * logits if settings.cross_entropy else tokens * vocab * max(UNFUSED_BYTES, 3 * compute)
        return HeadMemory(whole + states + gradient, gradient)
    chunk = min(settings.logits_memory, logits)
    retained = min(settings.retained or 0, logits) if trained and settings.loss == "log_probs" else 0
    unit = tokens * hidden * 4 if settings.loss == "log_probs" and not trained else 0
    return HeadMemory(chunk + retained + states + unit + gradient, gradient)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a trainer does with one micro-batch, apart from its size."""

    rows: int = 1  # sequences per unit of batch size: 2 for the trainers of pairs
    length: int = 1024  # tokens in a sequence
    loss_length: int = 1024  # how many of these have a loss
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)  # how the LM head runs
    reference_bytes: float = 0.0  # bytes of a reference model's weights; 0 for none
    # Sequences that each GPU generates at once with ``generate``, for a micro-batch of one sample; 0 for none.
    generated: int = 0
    all_micro_batches: bool = True  # whether the sequences of all accumulation steps are generated together
    reserved_fraction: float = 0.0  # fraction of the GPU that vLLM takes for itself


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its training: everything that a `Setting` leaves open."""

    parameters: Parameters  # the model's parameter counts
    shape: LayerShape  # the shape of its largest layer
    work: Work  # the work of a micro-batch
    weight_bytes: int = 2  # bytes per element of the trained weights as they are loaded; adapters are always fp32
    mixed: bool = True  # whether bf16 or fp16 autocast is on
    optim: str = "adamw_torch_fused"  # the Trainer's ``optim``
    optim_args: str = ""  # the Trainer's ``optim_args``
    # The attention implementation, as in ``attn_implementation``; ``"liger_trainer"`` is ours.
    implementation: str = "sdpa"
    recompute_mlp: bool = False  # whether gated MLPs recompute their product in the backward pass
    checkpoint_every: int = 1  # with checkpointing, one layer out of this many is checkpointed
    sync_each_batch: bool = False  # whether gradients are reduced after every micro-batch instead of once per step
