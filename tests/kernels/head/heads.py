"""What the tests of this folder share: small heads, heads on a GPU, comparisons, and a record of the matmuls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from liger_trainer.kernels.head.token_statistics import LogProbsOutput
from liger_trainer.kernels.runtime import INTERPRETED

IGNORE = -100
MIB = 2**20
TOKENS, HIDDEN, VOCAB = 13, 6, 20
ROW = 64 * 4  # bytes of one fp32 row of logits, padded to 64 columns
EXAMPLES = 25 if INTERPRETED else 60  # of Hypothesis; the interpreter is slow


def small_head(
    dtype: torch.dtype = torch.float32, tokens: int = TOKENS, seed: int = 0, trained: Sequence[int] = (0, 1, 2)
) -> Any:
    """Hidden states, head and bias, of which the `trained` ones need gradients, and labels, every fourth ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    target = torch.randint(0, VOCAB, (tokens,), generator=generator)
    target[::4] = IGNORE
    return (*[leaf.requires_grad_(index in trained) for index, leaf in enumerate(leaves)], target)


def gpu_head(
    tokens: int, size: int, vocab: int, dtype: torch.dtype = torch.bfloat16, scale: float = 3.0, trained: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head that may be `trained`, and labels, of which every fifth is ignored."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, device="cuda", dtype=dtype)
    weight = torch.randn(vocab, size, generator=generator, device="cuda", dtype=dtype) * (scale / size**0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    target[::5] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(trained), target


def needing_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `leaves` that require a gradient."""
    return [leaf for leaf in leaves if leaf.requires_grad]


def doubled(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves of the same values in float64, which require a gradient where `leaves` do."""
    return [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]


def in_double(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with every tensor in float64."""
    return {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def with_class_weights(options: dict[str, Any], vocab_size: int, device: str) -> dict[str, Any]:
    """`options` with class weights where they say ``weighted=True``."""
    options = dict(options)
    if options.pop("weighted", False):
        options["class_weights"] = torch.linspace(0.5, 2.0, vocab_size, device=device)
    return options


def assert_close(ours: Any, exact: Any, atol: float = 2e-5, rtol: float = 2e-5) -> None:
    """Compares with a result in float64, with tolerances for fp32 unless `ours` is in float64 too."""
    if ours.dtype == torch.float64:
        atol = rtol = 1e-7
    torch.testing.assert_close(ours.to(exact.dtype), exact, atol=atol, rtol=rtol)


def token_factors(result: LogProbsOutput) -> torch.Tensor:
    """Another number for every token."""
    log_probs = result.log_probs
    return torch.linspace(-1.0, 2.0, log_probs.numel(), device=log_probs.device).to(log_probs).view(log_probs.shape)


def weighted_loss(result: Any, entropy: bool = True) -> torch.Tensor:
    """A loss with another upstream gradient for every log-probability, and with `entropy` for every entropy too."""
    loss = (result.log_probs * token_factors(result)).sum()
    return loss + (result.entropy * token_factors(result).square()).sum() if entropy else loss


def relative_error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of `exact`."""
    return float((gradient.double() - exact.double()).norm() / exact.double().norm())


def assert_refused(function: Callable[..., Any], words: Sequence[str], **arguments: Any) -> None:
    """Checks that the call is a ValueError whose message has all `words`."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        function(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@contextlib.contextmanager
def recorded_matmuls() -> Iterator[list[int]]:
    """The number of tokens in every ``torch.mm`` and ``torch.addmm`` of a small head inside."""
    tokens: list[int] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def matmul(*args: Any, **kwargs: Any) -> torch.Tensor:
            left, right = args[-2:]
            tokens.append(next(size for size in (*left.shape, *right.shape) if size not in (HIDDEN, VOCAB)))
            return function(*args, **kwargs)

        return matmul

    with (
        mock.patch.object(torch, "mm", side_effect=recording(torch.mm)),
        mock.patch.object(torch, "addmm", side_effect=recording(torch.addmm)),
    ):
        yield tokens
