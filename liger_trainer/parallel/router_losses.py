"""Auxiliary losses of a mixture of experts: load balancing and the router's z-loss.

Load balancing (Switch Transformer, arXiv 2101.03961, equations 4 to 6; for k experts a token as transformers has it)::

    f_e = tokens that chose expert e / tokens    P_e = mean over the tokens of softmax(x)_e    loss = E sum_e f_e P_e

Tokens are those of all layers together. The smallest value is k, reached where all experts get equally many tokens. f
has no gradient.

Global batch (arXiv 2501.11873): f is taken over the tokens of all processes, P over those of this process. The mean of
the losses over the processes, whose gradient data parallelism computes, is then the loss of the global batch: experts
may specialise within a micro-batch as long as they are balanced over all of them.

z-loss (ST-MoE, arXiv 2202.08906, equation 5), which keeps the logits of a router small::

    loss = mean over the tokens of all layers of logsumexp(x)^2

Both are functions of the 2E + 1 numbers of `kernels/moe/router_statistics.py`, which one pass over the logits computes:
neither a one-hot nor a softmax of (T, E) is built or saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from liger_trainer.kernels.moe.router_statistics import router_statistics, router_statistics_reference
from liger_trainer.kernels.runtime import use_triton


class RouterLosses(NamedTuple):
    """Auxiliary losses of the routers, scalars in fp32 (float64 for float64 logits).

    Args:
        load_balancing: See [`load_balancing_loss`].
        z: See [`router_z_loss`].
    """

    load_balancing: torch.Tensor
    z: torch.Tensor


def load_balancing_loss(
    router_logits: torch.Tensor | Sequence[torch.Tensor],
    top_k: int,
    attention_mask: torch.Tensor | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """How unevenly the routers use their experts: ``E sum_e f_e P_e``, which is at least k.

    Equal to `load_balancing_loss_func` of transformers, except that the softmax of half-precision logits is taken in
    fp32 here and in half precision there.

    Args:
        router_logits: Logits of each layer, (T, E), or of a single layer. The kernel takes float16, bfloat16 and
            float32; other floating dtypes run the reference. The layers may be on several devices.
        top_k: Experts per token: those of its largest logits, the first of equal ones.
        attention_mask: T weights in any shape and dtype, such as (B, S): 0 for padding, 1 for a token. None counts all.
        process_group: Count the choices over the tokens of these processes, each of which must make this call. None
            counts those of this process alone.

    Returns:
        A scalar on the device of the first layer.

    Raises:
        ValueError: If there are no layers, logits are not (T, E) with the same E, `top_k` is not in 1 ... E, or the
            mask does not have T elements.
    """
    return router_losses(router_logits, top_k, attention_mask, process_group=process_group).load_balancing


def router_z_loss(
    router_logits: torch.Tensor | Sequence[torch.Tensor], attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """How large the logits of the routers are: the mean of ``logsumexp(x)^2`` over tokens and layers.

    Args:
        router_logits: See [`load_balancing_loss`].
        attention_mask: See [`load_balancing_loss`].

    Returns:
        A scalar on the device of the first layer.

    Raises:
        ValueError: See [`load_balancing_loss`].
    """
    return router_losses(router_logits, 1, attention_mask).z


def router_losses(
    router_logits: torch.Tensor | Sequence[torch.Tensor],
    top_k: int,
    attention_mask: torch.Tensor | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> RouterLosses:
    """Both losses in one pass over the logits.

    Args:
        router_logits: See [`load_balancing_loss`].
        top_k: See [`load_balancing_loss`].
        attention_mask: See [`load_balancing_loss`].
        process_group: See [`load_balancing_loss`].

    Returns:
        [`RouterLosses`].

    Raises:
        ValueError: See [`load_balancing_loss`].
    """
    layers = _checked_layers(router_logits, top_k)
    mask = None if attention_mask is None else _checked_mask(attention_mask, layers)
    return _losses(_statistics(layers, mask, top_k), layers, mask, process_group)


def router_losses_reference(
    router_logits: torch.Tensor | Sequence[torch.Tensor], top_k: int, attention_mask: torch.Tensor | None = None
) -> RouterLosses:
    """`router_losses` in plain torch, for one process and one device."""
    layers = _checked_layers(router_logits, top_k)
    mask = None if attention_mask is None else _checked_mask(attention_mask, layers)
    return _losses(router_statistics_reference(layers, mask, top_k), layers, mask, None)


def _checked_layers(router_logits: torch.Tensor | Sequence[torch.Tensor], top_k: int) -> list[torch.Tensor]:
    layers = [router_logits] if isinstance(router_logits, torch.Tensor) else list(router_logits)
    shapes = [tuple(logits.shape) for logits in layers]
    if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(
            f"`router_logits` has the shapes {shapes}; give (tokens, experts) of each layer, at least one."
        )
    if not all(logits.is_floating_point() for logits in layers):
        raise ValueError(f"`router_logits` has the dtypes {[logits.dtype for logits in layers]}; give floats.")
    if not 1 <= top_k <= shapes[0][1]:
        raise ValueError(f"`top_k` is {top_k}; with {shapes[0][1]} experts it must be in 1 ... {shapes[0][1]}.")
    return layers


def _checked_mask(mask: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
    if any(mask.numel() != logits.shape[0] for logits in layers):
        raise ValueError(
            f"`attention_mask` has shape {tuple(mask.shape)}, but the layers of `router_logits` have "
            f"{sorted({logits.shape[0] for logits in layers})} tokens; give one weight per token."
        )
    return mask.detach().reshape(-1).to(layers[0].device, torch.float32).contiguous()


def _statistics(layers: list[torch.Tensor], mask: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """The statistics of all layers, on the device of the first one."""
    function = router_statistics if all(map(use_triton, layers)) else router_statistics_reference
    parts = []
    for device in dict.fromkeys(logits.device for logits in layers):
        here = [logits for logits in layers if logits.device == device]
        parts.append(function(here, None if mask is None else mask.to(device), top_k).to(layers[0].device))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _losses(
    statistics: torch.Tensor,
    layers: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    process_group: dist.ProcessGroup | None,
) -> RouterLosses:
    num_experts = layers[0].shape[1]
    counts, sums, squares = statistics.split((num_experts, num_experts, 1))
    if mask is None:
        tokens = statistics.new_full((1,), sum(logits.shape[0] for logits in layers))
    else:
        tokens = mask.sum(dtype=statistics.dtype).reshape(1) * len(layers)
    counted = torch.cat([counts.detach(), tokens])
    if process_group is not None:
        dist.all_reduce(counted, group=process_group)
    share = counted[:-1] / counted[-1:]
    return RouterLosses((share * (sums / tokens)).sum() * num_experts, (squares / tokens).reshape(()))
