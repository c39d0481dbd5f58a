"""What the divergences of two heads share besides their kernel: options, per-token results, checks of the arguments.

With z the transformed logits of a token (`cross_entropy_options`: scale, soft-cap, then divided by the temperature), s
and t the softmax of the student's and of the teacher's, and m = (1 - beta) * s + beta * t:

    forward_kl    KL(t || s)                                reverse_kl    KL(s || t)
    jsd           beta * KL(t || m) + (1 - beta) * KL(s || m)   of 0 < beta < 1
    probs_kl      sum_c q[c] * (log(max(q[c], eps)) - log s[c])   for probabilities q that are given
    cosine        beta * (1 - cos(z_student, z_teacher))

and the token's loss is ``soft_weight * divergence + hard_weight * cross entropy``, the cross entropy being that of the
student's logits before the temperature. No factor of temperature**2 is applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.cross_entropy_options import compute_dtype

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
    """What the row step finds for every token, fp32 (float64 for float64 logits); 0 at ignored tokens.

    `hard` (the cross entropy) and `entropy` (the student's, of s) are empty where they were not asked for.
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
    """The loss and the outputs that were asked for; the others are None. Only `loss` carries a gradient.

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
    """Raises ValueError for an option out of its range, naming the option and what is allowed."""
    if isinstance(outputs, str):
        raise ValueError(f"`outputs` is the string {outputs!r}; give a tuple of names, such as ({outputs!r},).")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"`outputs` names {unknown}; the allowed names are {', '.join(map(repr, OUTPUTS))}.")
    if not 0.0 <= options.beta <= 1.0:
        raise ValueError(f"`beta` is {options.beta}; it must lie in [0, 1].")
    if not options.temperature > 0.0:
        raise ValueError(f"`temperature` is {options.temperature}; it must be more than 0.")
    for name in ("student_softcap", "teacher_softcap"):
        softcap = getattr(options, name)
        if softcap is not None and not softcap > 0.0:
            raise ValueError(f"`{name}` is {softcap}; it must be more than 0, or None for no soft-cap.")


def check_head(name: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless hidden states, head and bias of the model called `name` fit each other."""
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"`{name}_hidden` of shape {tuple(hidden.shape)} and `{name}_weight` of shape {tuple(weight.shape)} do not "
            "fit; they must be (..., H) and (V, H), with H at least 1."
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"`{name}_hidden` has dtype {hidden.dtype} and `{name}_weight` {weight.dtype}; both must be the same "
            "floating dtype, so cast one (under autocast, both) before the call."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"`{name}_bias` has shape {tuple(bias.shape)} and dtype {bias.dtype}; "
            f"it must be floating of ({weight.shape[0]},)."
        )
    for part, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"`{name}_hidden` is on {hidden.device} but `{name}_{part}` on {tensor.device}; move one.")


def check_tokens(name: str, tensor: torch.Tensor | None, hidden: torch.Tensor, integer: bool) -> None:
    """Raises ValueError unless `tensor`, called `name`, is None or holds one number for each token of `hidden`."""
    if tensor is None:
        return
    if tensor.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`{name}` has shape {tuple(tensor.shape)}; hidden states of shape {tuple(hidden.shape)} need "
            f"{tuple(hidden.shape[:-1])}."
        )
    if integer and tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`{name}` has dtype {tensor.dtype}; class ids must be int64 or int32.")
    if not integer and not tensor.is_floating_point():
        raise ValueError(f"`{name}` has dtype {tensor.dtype}; it must be floating.")
    if tensor.device != hidden.device:
        raise ValueError(f"`{name}` is on {tensor.device} but the hidden states on {hidden.device}; move it there.")


def common_vocab_size(student_vocab: int, teacher_vocab: int, vocab_size: int | None) -> int:
    """How many classes are compared: `vocab_size`, or what both heads have.

    Raises:
        ValueError: If the heads differ in size and nothing says how many classes are common, or that is too many.
    """
    if vocab_size is None:
        if student_vocab != teacher_vocab:
            raise ValueError(
                f"The student's head has {student_vocab} rows and the teacher's {teacher_vocab}. Where the vocabulary "
                f"is one and its padding differs, pass vocab_size={min(student_vocab, teacher_vocab)} (or the number "
                "of real tokens) to compare the first rows of both; different tokenizers cannot be compared."
            )
        vocab_size = student_vocab
    if not 1 <= vocab_size <= min(student_vocab, teacher_vocab):
        raise ValueError(
            f"`vocab_size` is {vocab_size}; with heads of {student_vocab} and {teacher_vocab} rows it must lie in "
            f"[1, {min(student_vocab, teacher_vocab)}]."
        )
    return vocab_size
