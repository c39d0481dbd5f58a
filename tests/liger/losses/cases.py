"""Small batches for the losses over a head, and the logits they never build."""

from __future__ import annotations

import dataclasses

import torch

PAIRS, TOKENS, HIDDEN, VOCAB = 3, 5, 8, 33
IGNORE = -100
ROW = 64  # columns of a row of logits, padded
ALL_AT_ONCE, ONE_PAIR, NOT_EVEN_ONE = 2**20, 2 * TOKENS, 1  # rows of logits that fit


def budget(rows: int, dtype: torch.dtype) -> int:
    """The `logits_memory` that holds so many rows."""
    return rows * ROW * dtype.itemsize


@dataclasses.dataclass
class Batch:
    """Hidden states, heads and labels; the first three are leaves that want a gradient."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    target: torch.Tensor
    ref_hidden: torch.Tensor
    ref_weight: torch.Tensor
    ref_bias: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.weight, self.bias

    @property
    def reference(self) -> tuple[torch.Tensor, ...]:
        return self.ref_hidden, self.ref_weight, self.ref_bias

    @property
    def mask(self) -> torch.Tensor:
        return self.target != IGNORE

    def log_probs(self, temperature: float = 1.0) -> torch.Tensor:
        """`(batch, tokens)` by plain torch, 0 where ignored."""
        return eager(*self.leaves, self.target, temperature)

    def ref_log_probs(self, temperature: float = 1.0) -> torch.Tensor:
        """The same of the reference."""
        return eager(*self.reference, self.target, temperature)


def eager(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of `target`, 0 where it is ignored, as a model with its logits gives them."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target == IGNORE, 0.0, log_probs)


def make_batch(dtype: torch.dtype = torch.float64, seed: int = 0, completions: int = 2 * PAIRS) -> Batch:
    """Completions of several lengths, some after a prompt; the reference has a hidden size of its own."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    target = torch.randint(0, VOCAB, (completions, TOKENS), generator=generator)
    target[0, 3:] = target[-1, :2] = target[completions // 2, 4:] = IGNORE
    policy = [normal(completions, TOKENS, HIDDEN), normal(VOCAB, HIDDEN, scale=0.5), normal(VOCAB, scale=0.1)]
    reference = [normal(completions, TOKENS, 6), normal(VOCAB, 6, scale=0.5), normal(VOCAB, scale=0.1)]
    return Batch(*(tensor.requires_grad_() for tensor in policy), target, *reference)


def gradients(loss: torch.Tensor, batch: Batch, upstream: float = 1.5) -> list[torch.Tensor]:
    """Of the leaves, by default for an upstream gradient that is not the expected one."""
    return list(torch.autograd.grad(loss * upstream, [leaf for leaf in batch.leaves if leaf.requires_grad]))
