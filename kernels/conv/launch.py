"""The launches of the kernels of short convolutions: tiles, grids, and the sums behind them.

Shapes: x (batch, tokens, columns); weight (channels, taps).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.conv.conv_kernels import backward_kernel, forward_kernel, halo_kernel
from liger_trainer.kernels.documents import Documents, resolved
from liger_trainer.kernels.rows import as_rows, column_sum
from liger_trainer.kernels.runtime import cdiv, has_elements, next_power_of_2, on_device

_CHUNKS = 2  # of a program of the backward


class Conv(NamedTuple):
    """What kind of convolution a kernel computes."""

    silu: bool = False
    residual: bool = False
    gated: bool = False
    head: int = 0
    """Channels of a head that is divided by its length; 0 for none."""
    eps: float = 0.0

    def options(self, weight: torch.Tensor, block: int) -> dict[str, int | bool]:
        """The constants of a launch with `block` channels a program, or more where a head has more."""
        channels, taps = weight.shape
        lanes = next_power_of_2(self.head) if self.head else block
        heads = max(1, block // lanes)
        head = self.head or block
        return {
            "C": channels,
            "TAPS": taps,
            "SILU": self.silu,
            "GATED": self.gated,
            "NORM": self.head > 0,
            "BLOCKS": cdiv(channels, heads * head),
            "HEADS": heads,
            "HEAD": head,
            "D": lanes,
        }


def empty_result(x: torch.Tensor, channels: int, documents: Documents) -> torch.Tensor:
    """A tensor for the results or gradients of the tokens of `x`: 0 for those of no document, if there are some."""
    shape = (*x.shape[:2], channels)
    return x.new_zeros(shape) if documents.padding else x.new_empty(shape)


def save(ctx: Any, documents: Documents, *tensors: torch.Tensor | None) -> None:
    """Saves these and the tables of the documents for a backward, which asks for them by `saved`."""
    ctx.save_for_backward(documents.spans, documents.chunks, *tensors)
    ctx.documents = documents._replace(spans=None, chunks=None)


def saved(ctx: Any) -> tuple[list[torch.Tensor | None], Documents]:
    """The tensors and the documents that `save` was given."""
    spans, chunks, *tensors = ctx.saved_tensors
    return tensors, ctx.documents._replace(spans=spans, chunks=chunks)


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    y: torch.Tensor,
    documents: Documents,
    conv: Conv,
) -> None:
    """Writes the results of the documents' tokens to `y`.

    Args:
        x: (batch, tokens, columns).
        weight: (channels, taps).
        bias: (channels,), or None.
        state: (documents without a parent, taps - 1, channels), or None.
        y: Contiguous (batch, tokens, channels).
        documents: The documents.
        conv: The kind of convolution.
    """
    if not has_elements(x):
        return
    documents, rows = resolved(documents, x), as_rows(x, None)
    assert documents.chunks is not None
    block, group, num_warps = forward_tile()
    options = conv.options(weight, block)
    with on_device(x):
        forward_kernel[(len(documents.chunks) * options["BLOCKS"],)](
            rows,
            *map(_contiguous, (weight, bias, state)),
            y,
            documents.spans,
            documents.chunks,
            rows.stride(0),
            conv.eps,
            RESIDUAL=conv.residual,
            GROUP=group,
            num_warps=num_warps,
            **options,
        )


def launch_backward(
    dys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    dx: torch.Tensor,
    documents: Documents,
    parts: Sequence[tuple[slice, Conv]],
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the gradients of the documents' tokens to `dx`, and returns those of taps, bias and initial states.

    Args:
        dys: For each part (batch, tokens, channels of the part).
        x: The input of the forward; the three arguments after it are its too.
        weight: Taps.
        bias: Bias, of one part that is all channels.
        state: Initial states, also of such a part.
        dx: Contiguous, of the shape of `x`.
        documents: The documents.
        parts: Channels, and the kind of convolution that they have. A gated one is a part with all of them.
        needed: Whether the gradients that are returned are needed. One that is not has no elements.
    """
    of_weight, of_bias, of_state = (
        each if each is not None and need else None for each, need in zip((weight, bias, state), needed)
    )
    dweight = x.new_empty(0) if of_weight is None else weight.new_empty(weight.shape)
    dbias = x.new_empty(0) if of_bias is None else of_bias.new_empty(of_bias.shape)
    dstate = x.new_empty(0) if of_state is None else of_state.new_empty(of_state.shape)
    if not has_elements(x):
        return dweight.zero_(), dbias.zero_(), dstate.zero_()
    documents, rows, dx_rows = resolved(documents, x), as_rows(x, None), dx.flatten(0, 1)
    assert documents.spans is not None
    assert documents.chunks is not None
    channels, taps = weight.shape
    programs = cdiv(len(documents.chunks), _CHUNKS)

    def sums(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    partial = None if of_weight is None and of_bias is None else sums(taps + (bias is not None), programs, channels)
    before = None if of_state is None else sums(documents.roots, taps - 1, channels)
    taps_by_channel, *others = map(_contiguous, (weight, bias, state))
    with on_device(x):
        for dy, (part, conv) in zip(dys, parts):
            part_taps = taps_by_channel[part]
            block, group, num_warps = backward_tile(conv)
            options = conv.options(part_taps, block)
            dy_rows, x_part, dx_part = as_rows(dy, None), rows[:, part], dx_rows[:, part]
            given = dy_rows, x_part, part_taps, *others
            tail = None
            if len(documents.spans) > documents.roots:
                tail = sums(documents.roots, taps - 1, dy_rows.shape[1])
            if tail is not None or before is not None:
                halo_kernel[(documents.roots * options["BLOCKS"],)](
                    *given,
                    tail,
                    before,
                    documents.spans,
                    dy_rows.stride(0),
                    rows.stride(0),
                    conv.eps,
                    num_warps=num_warps,
                    **options,
                )
            backward_kernel[(programs * options["BLOCKS"],)](
                *given,
                tail,
                dx_part,
                None if partial is None else partial[..., part],
                documents.spans,
                documents.chunks,
                dy_rows.stride(0),
                rows.stride(0),
                dx_rows.stride(0),
                channels,
                len(documents.chunks),
                conv.eps,
                RESIDUAL=conv.residual,
                GROUP=group,
                CHUNKS=_CHUNKS,
                num_warps=num_warps,
                **options,
            )
        if partial is not None and of_weight is not None:
            column_sum(partial[None, :taps], by_tap := of_weight.new_empty(taps, channels))
            dweight.copy_(by_tap.T)
        if partial is not None and of_bias is not None:
            column_sum(partial[taps:], dbias)
    if before is not None:
        dstate.copy_(before)
    return dweight, dbias, dstate


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def forward_tile() -> tuple[int, int, int]:
    """Channels of a program, tokens of a group and warps.

    4 channels a thread, loaded in 8 bytes, leave room for twice as many warps as 8 do, which is faster. Measured on an
    H200.
    """
    return 128, 4, 1


def backward_tile(conv: Conv) -> tuple[int, int, int]:
    """Channels of a program, tokens of a group and warps. Measured on an H200."""
    return (128, 4, 1) if conv.gated or conv.head else (64, 8, 1)
