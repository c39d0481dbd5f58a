"""The router of a mixture of experts, from its logits to the experts of each token and their weights.

::

    softmax:  p = softmax(l)       index = top k of p         w = p[index]     ( / their sum)
    sigmoid:  s = sigmoid(l)       index = top k of s + b     w = c s[index]   ( / (their sum + 1e-20))

The first is the router of Mixtral (arXiv 2401.04088), Qwen-MoE and OLMoE; divided by the sum it is the softmax of the k
largest logits, as GPT-OSS and Granite have it. The second is DeepSeek-V3's (arXiv 2412.19437): b, which balances the
load, takes part in the choice alone; where the experts lie in groups, those groups are allowed whose two best experts
add up to most. One group, no b and no division make it Llama 4's.

One pass over the logits forward and one backward, in fp32 with one rounding at the end. Saved for backward: the logits
and the index. Bytes moved in bf16 for T tokens and E experts: 2 TE forward and 4 TE backward (2 where the weights are
divided by their sum or are sigmoids), and 10 Tk for weights and index in each.

A program holds whole rows and takes their k largest one after the other, each a maximum of integers that order as
(number, lower expert first). So which of equal numbers is chosen is the same everywhere, where torch.topk promises
nothing; NaN counts as the largest number, as it does there. Experts come in the order of the choice, best first.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.moe.router_kernels import EPS, launch_route, launch_route_backward
from liger_trainer.kernels.runtime import use_triton


@torch.library.custom_op("liger_trainer::moe_router", mutates_args=())
def _route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    normalise: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = logits.new_empty((len(logits), k), dtype=dtype)
    index = logits.new_empty((len(logits), k), dtype=torch.int64)
    bias = None if correction_bias is None else correction_bias.contiguous()
    launch_route(logits, bias, weights, index, sigmoid, normalise, num_groups, top_groups, scale)
    return weights, index


@_route.register_fake
def _(logits, correction_bias, k, sigmoid, normalise, num_groups, top_groups, scale, dtype):
    size = (logits.shape[0], k)
    return logits.new_empty(size, dtype=dtype), logits.new_empty(size, dtype=torch.int64)


@torch.library.custom_op("liger_trainer::moe_router_backward", mutates_args=())
def _route_backward(
    d_weights: torch.Tensor, logits: torch.Tensor, index: torch.Tensor, sigmoid: bool, normalise: bool, scale: float
) -> torch.Tensor:
    d_logits = logits.new_empty(logits.shape)
    launch_route_backward(d_weights.contiguous(), logits, index, d_logits, sigmoid, normalise, scale)
    return d_logits


@_route_backward.register_fake
def _(d_weights, logits, index, sigmoid, normalise, scale):
    return logits.new_empty(logits.shape)


refuse_second_derivative(_route_backward, "topk_softmax_routing and grouped_topk_sigmoid_routing")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, _, ctx.sigmoid, ctx.normalise, _, _, ctx.scale, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, d_weights: torch.Tensor | None, d_index: None) -> tuple[Any, ...]:
    if d_weights is None:
        return (None,) * 9
    logits, index = ctx.saved_tensors
    d_logits = _route_backward(d_weights, logits, index, ctx.sigmoid, ctx.normalise, ctx.scale)
    return d_logits, *(None,) * 8


_route.register_autograd(_backward, setup_context=_setup_context)


def _check(logits: torch.Tensor, k: int) -> None:
    if logits.dim() != 2:
        raise ValueError(f"`logits` is {tuple(logits.shape)}; it must be (tokens, experts).")
    if not logits.is_floating_point():
        raise ValueError(f"`logits` is of {logits.dtype}; it must be of a floating dtype.")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"`k` is {k}; it must be from 1 to the number of experts, {logits.shape[1]}.")


def topk_softmax_routing(
    logits: torch.Tensor,
    k: int,
    *,
    normalise: bool = True,
    softmax_after_topk: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable experts of each token and their probabilities.

    Args:
        logits: (T, E), of any strides. float16, bfloat16 or float32 for the kernel; other dtypes run as the reference.
        k: Experts a token.
        normalise: Divide the probabilities by their sum.
        softmax_after_topk: Take the softmax of the k largest logits, whatever `normalise` is. That is the normalised
            probability; the reference then rounds as models do that have it in this order (GPT-OSS).
        dtype: Of the weights; that of `logits` by default.

    Returns:
        ``(top_k_weights, top_k_index)``, both (T, k), the latter int64; the most probable expert first. Of equal ones
        the kernel takes the lower index first, the reference what torch.topk takes.

    Raises:
        ValueError: If `logits` is not 2-D or not floating, or `k` less than 1 or more than E.
    """
    _check(logits, k)
    if not use_triton(logits):
        return topk_softmax_routing_reference(
            logits, k, normalise=normalise, softmax_after_topk=softmax_after_topk, dtype=dtype
        )
    normalise = normalise or softmax_after_topk
    weights, index = _route(logits, None, k, False, normalise, 1, 1, 1.0, dtype or logits.dtype)
    return weights, index


def topk_softmax_routing_reference(
    logits: torch.Tensor,
    k: int,
    *,
    normalise: bool = True,
    softmax_after_topk: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_softmax_routing` in plain torch."""
    if softmax_after_topk:
        top, index = logits.topk(k)
        return top.softmax(-1).to(dtype or logits.dtype), index
    weights, index = logits.softmax(-1, dtype=_wide(logits)).topk(k)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype or logits.dtype), index


def grouped_topk_sigmoid_routing(
    logits: torch.Tensor,
    k: int,
    *,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token with the largest sigmoids, corrected and of the best groups, and their weights.

    Args:
        logits: (T, E), of any strides. float16, bfloat16 or float32 for the kernel; other dtypes run as the reference.
        k: Experts a token.
        correction_bias: (E,), any float dtype; added to the sigmoids for the choice, not to the weights. It gets no
            gradient.
        num_groups: Groups of E / num_groups neighbouring experts.
        top_groups: How many of them a token may choose of: those whose two best experts have the largest sum.
        normalise: Divide the weights by their sum + 1e-20.
        scale: Factor of the weights.
        dtype: Of the weights; that of `logits` by default.

    Returns:
        ``(top_k_weights, top_k_index)``, both (T, k), the latter int64; the best choice first. Of equal experts, and
        groups, the kernel takes the lower index first, the reference what torch.topk takes.

    Raises:
        ValueError: If `logits` is not 2-D or not floating, `k` less than 1 or more than the experts of `top_groups`
            groups, `num_groups` does not divide E into groups of at least 2 (where there are several), `top_groups` is
            not from 1 to `num_groups`, or `correction_bias` is not (E,).
    """
    _check(logits, k)
    _check_groups(logits, k, correction_bias, num_groups, top_groups)
    if not use_triton(logits):
        return grouped_topk_sigmoid_routing_reference(
            logits,
            k,
            correction_bias=correction_bias,
            num_groups=num_groups,
            top_groups=top_groups,
            normalise=normalise,
            scale=scale,
            dtype=dtype,
        )
    bias = None if correction_bias is None else correction_bias.detach()
    weights, index = _route(logits, bias, k, True, normalise, num_groups, top_groups, scale, dtype or logits.dtype)
    return weights, index


def grouped_topk_sigmoid_routing_reference(
    logits: torch.Tensor,
    k: int,
    *,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_topk_sigmoid_routing` in plain torch, without its checks."""
    scores = logits.to(_wide(logits)).sigmoid()
    choice = scores.detach() if correction_bias is None else scores.detach() + correction_bias.detach()
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(top_groups).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    index = choice.topk(k).indices
    weights = scores.gather(-1, index)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
    return (weights * scale).to(dtype or logits.dtype), index


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check_groups(
    logits: torch.Tensor, k: int, correction_bias: torch.Tensor | None, num_groups: int, top_groups: int
) -> None:
    num_experts = logits.shape[1]
    if num_groups < 1 or num_experts % num_groups or 1 < num_groups > num_experts // 2:
        raise ValueError(
            f"`num_groups` is {num_groups}; it must divide the {num_experts} experts into groups of at least 2."
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"`top_groups` is {top_groups}; it must be from 1 to `num_groups`, {num_groups}.")
    if k > top_groups * (num_experts // num_groups):
        raise ValueError(f"`k` is {k}, but {top_groups} groups have {top_groups * num_experts // num_groups} experts.")
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise ValueError(
            f"`correction_bias` is {tuple(correction_bias.shape)}; it must be ({num_experts},), one for each expert."
        )
