"""Divergences of two heads: formulas, options, results of a token, outputs, and checks of the arguments.

With z the transformed logits of a token (`logit_rows`: scaled, soft-capped, then divided by the temperature), s and t
the softmax of the student's and of the teacher's, and m = (1 - beta) * s + beta * t:

    forward_kl    KL(t || s)                                reverse_kl    KL(s || t)
    jsd           beta * KL(t || m) + (1 - beta) * KL(s || m)   of 0 < beta < 1
    probs_kl      sum_c q[c] * (log(max(q[c], eps)) - log s[c])   for given probabilities q
    cosine        beta * (1 - cos(z_student, z_teacher))

and the token's loss is ``soft_weight * divergence + hard_weight * cross entropy``, the cross entropy being that of the
student's logits before the temperature. No factor of temperature**2 is applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.head.loss_arguments import check_outputs, check_transform
from liger_trainer.kernels.head.row_statistics import compute_dtype

OUTPUTS = ("soft_loss", "hard_loss", "entropy", "token_divergence")


class DivergenceOptions(NamedTuple):
    """The options of one token's loss, in the order in which the operator takes them."""

    divergence: str
    beta: float
    temperature: float
    soft_weight: float
    hard_weight: float
    student_softcap: float | None
    student_logit_scale: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    eps: float
    ignore_index: int


class DivergenceStats(NamedTuple):
    """Results of every token, fp32 (float64 for float64 logits); 0 at ignored tokens.

    `soft` is the divergence, `hard` the cross entropy, `entropy` that of s. The last two are empty if not asked for.
    """

    soft: torch.Tensor
    hard: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def allocate(cls, like: torch.Tensor, tokens: int, hard: bool, entropy: bool) -> DivergenceStats:
        """Uninitialised statistics of `tokens` tokens on the device of `like`."""
        dtype = compute_dtype(like)
        return cls(*(like.new_empty(tokens if wanted else 0, dtype=dtype) for wanted in (True, hard, entropy)))

    def rows(self, start: int, stop: int) -> DivergenceStats:
        """The statistics of tokens `start` to `stop`, as views."""
        return DivergenceStats(*(field[start:stop] for field in self))


@dataclasses.dataclass
class DivergenceOutput:
    """The loss and the outputs that were asked for; the others are None. Only `loss` has a gradient.

    Attributes:
        loss: fp32, 0-d.
        soft_loss: fp32 0-d, the divergences reduced as `loss` is, before `soft_weight`.
        hard_loss: fp32 0-d, the cross entropies reduced as `loss` is, before `hard_weight`.
        entropy: fp32 per token, of the student's softmax at the temperature; 0 at ignored tokens.
        token_divergence: fp32 per token, without any weight; 0 at ignored tokens.
    """

    loss: torch.Tensor
    soft_loss: torch.Tensor | None = None
    hard_loss: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    token_divergence: torch.Tensor | None = None


def check_divergence_options(options: DivergenceOptions, outputs: Sequence[str]) -> None:
    """Raises ValueError unless every option of a divergence is in its range."""
    check_outputs(outputs, OUTPUTS)
    if not 0.0 <= options.beta <= 1.0:
        raise ValueError(f"`beta` is {options.beta}; it must lie in [0, 1].")
    softcaps = {"student_softcap": options.student_softcap, "teacher_softcap": options.teacher_softcap}
    check_transform(options.temperature, **softcaps)


def common_vocab_size(student_vocab: int, teacher_vocab: int, vocab_size: int | None) -> int:
    """How many classes are compared: `vocab_size`, by default all those of both heads.

    Raises:
        ValueError: If the heads differ in size and `vocab_size` is None, or if it is not within both.
    """
    if vocab_size is None:
        if student_vocab != teacher_vocab:
            raise ValueError(
                f"The student's head has {student_vocab} rows and the teacher's {teacher_vocab}. If they "
                f"pad one vocabulary differently, pass vocab_size={min(student_vocab, teacher_vocab)} (or the number "
                "of real tokens) to compare the first rows of both; different tokenizers cannot be compared."
            )
        vocab_size = student_vocab
    if not 1 <= vocab_size <= min(student_vocab, teacher_vocab):
        raise ValueError(
            f"`vocab_size` is {vocab_size}; with heads of {student_vocab} and {teacher_vocab} rows it must lie in "
            f"[1, {min(student_vocab, teacher_vocab)}]."
        )
    return vocab_size
