"""Every operator with small arguments, one line each, for the tests that all of them must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from liger_trainer import functional as ops

Argument = Callable[[torch.Generator, torch.dtype], torch.Tensor]


def leaf(*shape: int) -> Argument:
    """Random numbers that need a gradient."""
    return lambda generator, dtype: torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def table(*shape: int) -> Argument:
    """Random numbers that need none."""
    return lambda generator, dtype: torch.rand(shape, generator=generator).to(dtype)


def labels(high: int, *shape: int) -> Argument:
    """Random ids below `high`, the last one ignored."""
    return lambda generator, dtype: torch.cat(
        [torch.randint(0, high, (*shape[:-1], shape[-1] - 1), generator=generator), torch.full((*shape[:-1], 1), -100)],
        dim=-1,
    )


def ids(high: int, *shape: int) -> Argument:
    """Random ids below `high`."""
    return lambda generator, dtype: torch.randint(0, high, shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Operator:
    """A function of tensors and its arguments.

    Args:
        function: A public function, or a closure over one.
        arguments: What makes them, in order.
        refuses: The function that the error about a second derivative names; None where there is one, or where another
            test asks for it.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    refuses: str | None = None

    def tensors(self, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
        """The arguments; floating ones of `dtype`."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [argument(generator, dtype) for argument in self.arguments]
        return [tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in tensors]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The outputs and, for upstream gradients of 0.5, the gradients of the arguments that need one."""
        outputs = self.function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        needed = [tensor for tensor in tensors if tensor.requires_grad]
        upstream = [torch.full_like(output, 0.5) for output in outputs]
        return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, needed, upstream)]


def _of_activations(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` of a first argument that is no leaf, so that it may be overwritten."""
    return lambda first, *rest: function(first * 1.0, *rest, **options)


def _with_entropy(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = ops.linear_log_probs(*tensors, outputs=("entropy",))
    return result.log_probs, result.entropy


def _policy_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of what is differentiated, then advantages and two tables of log-probabilities."""
    return lambda *tensors: function(*tensors[:-2], None, *tensors[-2:], beta=0.1).loss


def _in_tiles(x: torch.Tensor) -> torch.Tensor:
    return ops.tiled_mlp(lambda _, tile: ops.swiglu_fused(tile), nn.Identity(), x, 2, preserve_rng_state=False)


def _rope_complex(q: torch.Tensor, k: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ops.rope_complex(q, k, torch.view_as_complex(factors.float()))


_CE, _LCE = "cross_entropy", "linear_cross_entropy"
_LOGITS, _HEAD = (leaf(5, 70), labels(70, 5)), (leaf(5, 16), leaf(70, 16), labels(70, 5))
_SCORES = (leaf(1, 2, 9, 9), leaf(2, 2, 3, 3), leaf(2))
_TWO_HEADS = (leaf(5, 16), leaf(70, 16), table(5, 8), table(70, 8), labels(70, 5))
_POLICY = (table(2), table(2, 4), table(2, 4))

OPERATORS: dict[str, Operator] = {
    "rms_norm": Operator(ops.rms_norm, (leaf(6, 32), leaf(32))),
    "fused_add_rms_norm": Operator(ops.fused_add_rms_norm, (leaf(6, 32), leaf(6, 32), leaf(32))),
    "layer_norm": Operator(ops.layer_norm, (leaf(6, 32), leaf(32), leaf(32))),
    "rope": Operator(ops.rope, (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), table(1, 3, 8), table(1, 3, 8))),
    "swiglu": Operator(ops.swiglu, (leaf(6, 24), leaf(6, 24))),
    "swiglu_fused": Operator(ops.swiglu_fused, (leaf(6, 48),)),
    "geglu": Operator(ops.geglu, (leaf(6, 24), leaf(6, 24))),
    "geglu_fused": Operator(ops.geglu_fused, (leaf(6, 48),)),
    "softmax": Operator(ops.softmax, (leaf(6, 50),), "softmax"),
    "sparsemax": Operator(ops.sparsemax, (leaf(6, 50),), "sparsemax"),
    "sparsemax, dim": Operator(partial(ops.sparsemax, dim=0), (leaf(6, 50),), "sparsemax"),
    "multi_token_attention": Operator(partial(ops.multi_token_attention, padding=1), _SCORES, "softmax"),
    "multi_token_attention, sparse": Operator(partial(ops.multi_token_attention, sparse=True), _SCORES, "sparsemax"),
    "cross_entropy": Operator(ops.cross_entropy, _LOGITS, _CE),
    "cross_entropy, none": Operator(partial(ops.cross_entropy, reduction="none", softcap=4.0), _LOGITS, _CE),
    "cross_entropy, expected": Operator(partial(ops.cross_entropy, expected_grad=0.5), _LOGITS, _CE),
    "cross_entropy, in place": Operator(_of_activations(ops.cross_entropy, inplace=True), _LOGITS, _CE),
    "linear_cross_entropy": Operator(ops.linear_cross_entropy, _HEAD, _LCE),
    "linear_cross_entropy, none": Operator(partial(ops.linear_cross_entropy, reduction="none"), _HEAD, _LCE),
    "linear_log_probs": Operator(ops.linear_log_probs, _HEAD, "linear_log_probs"),
    "linear_log_probs, entropy": Operator(_with_entropy, _HEAD, "linear_log_probs"),
    "linear_log_probs, frozen head": Operator(
        ops.linear_log_probs, (leaf(5, 16), table(70, 16), labels(70, 5)), "linear_log_probs"
    ),
    "linear_jsd": Operator(partial(ops.linear_jsd, hard_weight=0.5), _TWO_HEADS, "linear_jsd"),
    "linear_kl": Operator(ops.linear_kl, _TWO_HEADS, "linear_kl"),
    "linear_cosine_distance": Operator(ops.linear_cosine_distance, _TWO_HEADS, "linear_cosine_distance"),
    "linear_kl_div": Operator(
        ops.linear_kl_div, (leaf(5, 16), leaf(70, 16), table(5, 70), labels(70, 5)), "linear_kl_div"
    ),
    "kl_div": Operator(ops.kl_div, (leaf(6, 50), table(6, 50)), "kl_div"),
    "jsd": Operator(ops.jsd, (leaf(6, 50), table(6, 50)), "jsd"),
    "tvd": Operator(partial(ops.tvd, reduction="none"), (leaf(6, 50), table(6, 50)), "tvd"),
    "fused_ce_tvd": Operator(ops.fused_ce_tvd, (leaf(5, 70), table(5, 70), labels(70, 5)), "fused_ce_tvd"),
    "grpo_loss": Operator(_policy_loss(ops.grpo_loss), (leaf(2, 5, 30), labels(30, 2, 4), *_POLICY), _CE),
    "grpo_loss_from_log_probs": Operator(_policy_loss(ops.grpo_loss_from_log_probs), (leaf(2, 4), *_POLICY)),
    "fused_add_layer_norm": Operator(ops.fused_add_layer_norm, (leaf(6, 32), leaf(6, 32), leaf(32), leaf(32))),
    "modulated_rms_norm": Operator(
        ops.modulated_rms_norm, (leaf(2, 3, 32), leaf(32), leaf(2, 32), leaf(2, 32)), "modulated_rms_norm"
    ),
    "group_norm": Operator(
        lambda x, *parameters: ops.group_norm(x, 2, *parameters), (leaf(2, 4, 6), leaf(4), leaf(4)), "group_norm"
    ),
    "poly_norm": Operator(ops.poly_norm, (leaf(6, 32), leaf(3), leaf(1)), "poly_norm"),
    "dyt": Operator(ops.dyt, (leaf(6, 32), leaf(1), leaf(32), leaf(32)), "dyt"),
    "qk_norm_rope": Operator(
        ops.qk_norm_rope,
        (leaf(2, 3, 4, 8), leaf(2, 3, 2, 8), leaf(8), leaf(8), table(1, 3, 8), table(1, 3, 8)),
        "qk_norm_rope",
    ),
    "rope_complex": Operator(_rope_complex, (leaf(2, 3, 4, 8), leaf(2, 3, 2, 8), table(1, 3, 4, 2))),
    "rope_multimodal": Operator(
        partial(ops.rope_multimodal, sections=(1, 1, 2)),
        (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), table(3, 2, 3, 8), table(3, 2, 3, 8)),
    ),
    "rope_vision": Operator(ops.rope_vision, (leaf(3, 4, 8), leaf(3, 2, 8), table(3, 8), table(3, 8))),
    "relu_squared": Operator(ops.relu_squared, (leaf(6, 24),), "relu_squared"),
    "relu_squared, in place": Operator(_of_activations(ops.relu_squared, inplace_backward=True), (leaf(6, 24),)),
    "clamped_swiglu": Operator(partial(ops.clamped_swiglu, limit=1.0), (leaf(6, 48),), "clamped_swiglu"),
    "swiglu_down": Operator(ops.swiglu_down, (leaf(6, 24), leaf(6, 24), leaf(8, 24), leaf(8)), "swiglu_down"),
    "geglu_down": Operator(ops.geglu_down, (leaf(6, 24), leaf(6, 24), leaf(8, 24)), "geglu_down"),
    "tiled_mlp": Operator(_in_tiles, (leaf(6, 48),), "tiled_mlp"),
    "embedding": Operator(ops.embedding, (ids(20, 40), leaf(20, 8))),
    "tied_embedding": Operator(ops.tied_embedding, (ids(20, 40), leaf(20, 8))),
}
"""Each public function under its own name; after a comma, the same with other options."""

ELSEWHERE = {
    "embedding_backward_",  # has no gradient; test_embedding.py
    "vocab_parallel_cross_entropy",  # need a process group; test_vocab_parallel.py
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_log_probs",
}
"""Public functions that are no rows of the table."""
