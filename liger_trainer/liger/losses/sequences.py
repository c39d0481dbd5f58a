"""What the losses of whole completions share: checks, log-probabilities of completions, and those of the reference."""

from __future__ import annotations

import torch

from liger_trainer.functional import linear_log_probs

LOGITS_MEMORY = 2**30


def check_sequences(hidden: torch.Tensor, target: torch.Tensor, hidden_name: str, target_name: str) -> None:
    """Raises ValueError unless there are hidden states `(B, T, H)` and labels `(B, T)` of at least one token."""
    if hidden.dim() != 3 or target.shape != hidden.shape[:2] or not target.numel():
        raise ValueError(
            f"`{hidden_name}` has shape {tuple(hidden.shape)} and `{target_name}` {tuple(target.shape)}; they must be "
            "(batch, tokens, hidden) and (batch, tokens), with at least one token."
        )


def check_shape(name: str, tensor: torch.Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless the argument `name` is None or has one of `shapes`."""
    if tensor is not None and tuple(tensor.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; it must be {allowed}.")


def completion_log_probs(log_probs: torch.Tensor, mask: torch.Tensor, average: bool) -> torch.Tensor:
    """Sums, or means, of `(..., T)` log-probabilities over the tokens in `mask`; 0 for a completion without tokens."""
    total = torch.where(mask, log_probs, 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


@torch.no_grad()
def reference_log_probs(
    ref_input: torch.Tensor | None,
    ref_weight: torch.Tensor | None,
    ref_bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    temperature: float = 1.0,
    logits_memory: int = LOGITS_MEMORY,
) -> torch.Tensor:
    """Log-probabilities `(B, T)` of `target` under the reference model's head, without a gradient.

    Raises:
        ValueError: If there are no hidden states or no head, or not of the same tokens.
    """
    if ref_input is None or ref_weight is None:
        raise ValueError(
            "use_ref_model=True needs the reference model's hidden states `ref_input`, (batch, tokens, hidden), and "
            "its head `ref_weight`, (vocab, hidden); give both, or use_ref_model=False."
        )
    check_sequences(ref_input, target, "ref_input", "target")
    result = linear_log_probs(
        *(ref_input, ref_weight, target, ref_bias),
        ignore_index=ignore_index,
        temperature=temperature,
        logits_memory=logits_memory,
    )
    assert isinstance(result, torch.Tensor)
    return result
