"""How the kernels of `qk_norm_rope` are launched."""

from __future__ import annotations

import torch

from liger_trainer.kernels.norms.launch import NormConfig, column_sum, fit_config
from liger_trainer.kernels.rope.qk_norm_rope_kernels import backward_kernel, forward_kernel
from liger_trainer.kernels.rope.rope_kernel import contiguous_columns, table_strides
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, on_device


def _num_warps(block: int) -> int:
    """So many that half a head has fewer numbers than a program has threads: a weight then needs no own layout."""
    return min(16, max(4, block // 32))


def forward_config(block: int) -> NormConfig:
    """Tile and warps of the forward kernel, for heads of up to `block` numbers.

    4,096 numbers of 4 warps are four 16-byte loads of bf16 in flight in each thread.
    """
    return NormConfig(rows=max(1, 4096 // block), num_warps=_num_warps(block))


def backward_config(block: int) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel, for heads of up to `block` numbers.

    A tile, its gradient and the weight gradient are in registers, 32 numbers a thread each with 4 warps: three programs
    share a multiprocessor. The next tile is fetched while one is computed.
    """
    num_warps = _num_warps(block)
    programs = max(1, 12 // num_warps)
    return NormConfig(rows=max(1, 4096 // block), num_warps=num_warps, num_stages=2, programs_per_sm=programs)


def _tile(rows: int, num_heads: int) -> tuple[int, int]:
    """(tokens, heads) of a tile of `rows` rows, with as many heads of a token as there are."""
    heads = min(rows, next_power_of_2(max(num_heads, 1)))
    return rows // heads, heads


def _spread(tile: tuple[int, int], block_half: int, config: NormConfig) -> bool:
    """Whether a tile's table is so large that Triton would give it a layout of its own, and convert what is read."""
    return tile[0] * block_half >= 32 * config.num_warps


def _num_tiles(x: torch.Tensor, tile: tuple[int, int]) -> int:
    batch, seq_len, heads, _ = x.shape
    return batch * cdiv(seq_len, tile[0]) * cdiv(heads, tile[1])


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    eps: float,
    offset: float,
    casting: str,
    config: NormConfig | None = None,
) -> None:
    """Fills the results and rstd, whose memory is contiguous (batch, seq, heads, ...), the shape of q and k."""
    head_dim, half = q.shape[-1], cos.shape[-1] // 2
    q, k, cos, sin = (contiguous_columns(x) for x in (q, k, cos, sin))
    block_half = next_power_of_2(max(half, 1))
    config = config or forward_config(next_power_of_2(head_dim))
    q_tile, k_tile = _tile(config.rows, q.shape[2]), _tile(config.rows, k.shape[2])
    q_tiles, k_tiles = _num_tiles(q, q_tile), _num_tiles(k, k_tile)
    if q_tiles + k_tiles == 0:
        return
    with on_device(q):
        forward_kernel[(q_tiles + k_tiles,)](
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            cos,
            sin,
            q_out,
            k_out,
            q_rstd,
            k_rstd,
            q.shape[1],
            q_tiles,
            *q.stride()[:3],
            *k.stride()[:3],
            *table_strides(cos)[1:],
            *table_strides(sin)[1:],
            eps,
            offset,
            NUM_Q_HEADS=q.shape[2],
            NUM_K_HEADS=k.shape[2],
            HEAD_DIM=head_dim,
            HALF=half,
            CASTING=casting,
            Q_TOKENS=q_tile[0],
            Q_HEADS=q_tile[1],
            K_TOKENS=k_tile[0],
            K_HEADS=k_tile[1],
            BLOCK_HALF=block_half,
            BLOCK_TAIL=next_power_of_2(max(head_dim - 2 * half, 1)),
            SPREAD_Q=_spread(q_tile, block_half, config),
            SPREAD_K=_spread(k_tile, block_half, config),
            num_warps=config.num_warps,
        )


def launch_backward(
    dq_out: torch.Tensor | None,
    dk_out: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dq_weight: torch.Tensor | None,
    dk_weight: torch.Tensor | None,
    offset: float,
    casting: str,
    config: NormConfig | None = None,
) -> None:
    """Fills the gradients that are given; all of q's side are None where `dq_out` is, and all of k's with `dk_out`."""
    head_dim, half = q.shape[-1], cos.shape[-1] // 2
    q, k, cos, sin = (contiguous_columns(x) for x in (q, k, cos, sin))
    dq_out, dk_out = (None if x is None else contiguous_columns(x) for x in (dq_out, dk_out))
    block, block_half = next_power_of_2(head_dim), next_power_of_2(max(half, 1))
    config = fit_config(config or backward_config(block), block, 2 * q.element_size(), q.device)
    q_tile, k_tile = _tile(config.rows, q.shape[2]), _tile(config.rows, k.shape[2])
    q_tiles = 0 if dq_out is None else _num_tiles(q, q_tile)
    k_tiles = 0 if dk_out is None else _num_tiles(k, k_tile)
    programs = min(q_tiles + k_tiles, num_sms(q.device) * config.programs_per_sm)
    weight_gradients = [gradient for gradient in (dq_weight, dk_weight) if gradient is not None]
    if programs == 0:
        for gradient in weight_gradients:
            gradient.zero_()
        return
    partial = q.new_empty(len(weight_gradients), programs, head_dim, dtype=torch.float32)
    with on_device(q):
        backward_kernel[(programs,)](
            dq_out,
            dk_out,
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            q_rstd,
            k_rstd,
            cos,
            sin,
            dq,
            dk,
            None if dq_weight is None else partial[0],
            None if dk_weight is None else partial[-1],
            q.shape[1],
            q_tiles,
            k_tiles,
            *(q if dq_out is None else dq_out).stride()[:3],
            *(k if dk_out is None else dk_out).stride()[:3],
            *q.stride()[:3],
            *k.stride()[:3],
            *table_strides(cos)[1:],
            *table_strides(sin)[1:],
            offset,
            NUM_Q_HEADS=q.shape[2],
            NUM_K_HEADS=k.shape[2],
            HEAD_DIM=head_dim,
            HALF=half,
            CASTING=casting,
            Q_TOKENS=q_tile[0],
            Q_HEADS=q_tile[1],
            K_TOKENS=k_tile[0],
            K_HEADS=k_tile[1],
            BLOCK_HALF=block_half,
            BLOCK_TAIL=next_power_of_2(max(head_dim - 2 * half, 1)),
            SPREAD_Q=_spread(q_tile, block_half, config),
            SPREAD_K=_spread(k_tile, block_half, config),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        if weight_gradients:
            column_sum(partial, *weight_gradients)
