"""An MLP over tiles of the sequence that is its own checkpoint (after Arctic Long Sequence Training, arXiv 2506.13996).

The forward runs the MLP tile by tile and saves only its input. The backward recomputes each tile, takes its gradients,
and returns the gradient of the input and one sum for each parameter: hooks of DDP and FSDP on a parameter see one
gradient, as they do without tiles. Sums of half-precision gradients are in fp32, and linear layers add to them without
building the gradient of a tile (`summed_linear.py`).

Cost: one more forward of the MLP, except for a last layer that is linear (11 instead of 9 products of weights and
tokens for a gated MLP). Memory: the intermediates of one tile and, in the backward, the summed gradients.

Inside a layer that is checkpointed as a whole, the MLP would run a third time, for nothing: the backward of the tiles
only needs their input. So the input is saved by a node of its own, before the tiles. A non-reentrant checkpoint stops
as soon as it has recomputed every saved tensor, which is then the case before the tiles, unless something after the MLP
in the layer saves a tensor (a residual addition does not; a norm after the MLP does). A reentrant checkpoint always
runs the layer to its end.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.autograd import second_derivative_message
from liger_trainer.kernels.runtime import saved_as_is
from liger_trainer.tiling.summed_linear import GradientSum, ResultFinder, SummingLinears

DEFAULT_TILE_MEMORY = 512 * 2**20

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class _Call(nn.Module):
    """`mlp_forward(module, x)` as the forward of a module, so that `functional_call` can replace the parameters."""

    mlp_forward: Forward

    def __init__(self, mlp_forward: Forward, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__["mlp_forward"] = mlp_forward
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        # Each place once: functional_call does not restore a module that it meets under two names.
        self.places = {
            f"{path}.{key}": names[id(parameter)]
            for path, part in module.named_modules(prefix="module")
            for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        }

    def forward(self, x: torch.Tensor, finish: Callable[[torch.Tensor], Any]) -> Any:
        """`finish` of the MLP's result for the tile `x`."""
        y = self.mlp_forward(self.module, x)
        if not isinstance(y, torch.Tensor) or y.shape[:-1] != x.shape[:-1]:
            given = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise ValueError(
                f"`mlp_forward` returned {given} for {tuple(x.shape)}; it must return one vector per token."
            )
        return finish(y)

    def with_parameters(
        self,
        parameters: dict[str, torch.Tensor],
        tile: torch.Tensor,
        finish: Callable[[torch.Tensor], Any] = lambda y: y,
    ) -> Any:
        """`finish` of the result for one tile, with `parameters` in place of the module's own."""
        tensors = {place: parameters[name] for place, name in self.places.items() if name in parameters}
        return functional_call(self, tensors, (tile, finish), tie_weights=False)


def _tiles(x: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
    """Tiles of the tokens, with as many dimensions as `x`; all leading ones are 1, so tiles cross sequences."""
    tokens = x.reshape(*(1,) * (x.dim() - 2), -1, x.shape[-1])
    yield from tokens.split(length, dim=-2) if tokens.shape[-2] else (tokens,)


def _forward_in_tiles(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, length: int) -> torch.Tensor:
    """The results of `call` for tiles of `length` tokens, in one tensor."""
    result, start = None, 0
    for tile in _tiles(x, length):
        y = call(tile)
        if result is None:
            result = y.new_empty((*x.shape[:-1], y.shape[-1]))
            tokens = result.view(*y.shape[:-2], -1, y.shape[-1])
        tokens.narrow(-2, start, y.shape[-2]).copy_(y)
        start += y.shape[-2]
    assert result is not None
    return result


class _State:
    """The current state that a forward depends on besides its tensors: autocast and random numbers."""

    def __init__(self, device: torch.device, preserve_rng_state: bool) -> None:
        self.device = device
        self.enabled = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type)
        self.rng = None
        if preserve_rng_state:
            on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
            self.rng = torch.get_rng_state(), on_device

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context with that state; random numbers go on afterwards from where they were."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, self.dtype, enabled=self.enabled))
            if self.rng is not None:
                on_cpu, on_device = self.rng
                devices = [] if on_device is None else [self.device]
                kind = "cuda" if on_device is None else self.device.type
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
                torch.set_rng_state(on_cpu)
                if on_device is not None:
                    torch.get_device_module(self.device).set_rng_state(on_device, self.device)
            yield


class _SaveInput(torch.autograd.Function):
    """Saves what the backward of the tiles needs, before them, so that a checkpoint around need not run them again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameters: tuple[torch.Tensor, ...], saving: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, *parameters)
        saving.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0], None, None


class _Tiled(torch.autograd.Function):
    """The MLP in tiles; `saving` is the context of the `_SaveInput` before it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        call: _Call,
        names: tuple[str, ...],
        saving: Any,
        need_x: bool,
        length: int,
        preserve_rng_state: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.names, ctx.saving, ctx.need_x, ctx.length = call, names, saving, need_x, length
        ctx.state = _State(x.device, preserve_rng_state)
        # Detached: autocast would cache casts of leaves that require gradients, and here these would have no graph.
        values = {name: parameter.detach() for name, parameter in zip(names, parameters)}
        ctx.unread = []

        def forward(tile: torch.Tensor) -> torch.Tensor:
            finder = ResultFinder()
            with finder.watching(call.module):
                y = call.with_parameters(values, tile)
            ctx.unread.append(finder.call_of(y))
            return y

        return _forward_in_tiles(forward, x, length)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        (dy,) = gradients
        if dy is None:
            return None, None, None, None, None, None, None, *([None] * len(ctx.names))
        if torch.is_grad_enabled():
            raise RuntimeError(second_derivative_message("tiled_mlp"))
        x, *parameters = ctx.saving.saved_tensors
        # New leaves, so that neither hooks of the parameters nor their .grad see the gradient of a single tile.
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        values = dict(zip(ctx.names, leaves))
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.need_x else None
        sums = [GradientSum(leaf.detach(), several=x.shape[:-1].numel() > ctx.length) for leaf in leaves]
        start = 0
        with ctx.state.restored(), saved_as_is():
            for tile, dy_tile, unread in zip(_tiles(x.detach(), ctx.length), _tiles(dy, ctx.length), ctx.unread):
                inputs = [tile.detach().requires_grad_(), *leaves][0 if ctx.need_x else 1 :]
                gradients_of = functools.partial(
                    torch.autograd.grad, inputs=inputs, grad_outputs=dy_tile, allow_unused=True
                )
                linears = SummingLinears({id(leaf): total for leaf, total in zip(leaves, sums)}, unread)
                # The gradients are taken inside of the context, where a checkpoint in the MLP recomputes what it ran.
                with torch.enable_grad(), linears.within(ctx.call.module):
                    found = list(ctx.call.with_parameters(values, inputs[0] if ctx.need_x else tile, gradients_of))
                if dx is not None:
                    dtile = found.pop(0)
                    rows = dx.view(-1, dx.shape[-1]).narrow(0, start, tile.shape[-2])
                    rows.zero_() if dtile is None else rows.copy_(dtile.reshape(rows.shape))
                start += tile.shape[-2]
                for total, gradient in zip(sums, found):
                    total.add(gradient)
        return dx, None, None, None, None, None, None, *(total.take() for total in sums)


def _widths(module: nn.Module) -> Iterator[int]:
    """The sum of input and output size of each matrix in `module`."""
    for part in module.modules():
        width, height = getattr(part, "in_features", None), getattr(part, "out_features", None)
        if isinstance(width, int) and isinstance(height, int) and not any(part.children()):
            yield width + height  # the shape of a quantised weight does not tell
        else:
            yield from (sum(p.shape) for p in part.parameters(recurse=False) if p.dim() == 2)


def tile_length(module: nn.Module, x: torch.Tensor, num_tiles: int | None, tile_memory: int) -> int:
    """The number of tokens of a tile.

    Without `num_tiles` it is as large as `tile_memory` allows, assuming that a token needs the input and the output of
    every linear layer or matrix in the module, which is about what the backward of a gated MLP holds.
    """
    tokens = x.numel() // max(x.shape[-1], 1)
    if num_tiles is not None:
        if num_tiles < 1:
            raise ValueError(f"`num_tiles` is {num_tiles}; it must be at least 1.")
        return max(math.ceil(tokens / num_tiles), 1)
    if tile_memory < 1:
        raise ValueError(f"`tile_memory` is {tile_memory}; it must be a positive number of bytes.")
    width = sum(_widths(module))
    if not width:
        raise ValueError("`module` has no matrices to estimate the memory of a tile from; give `num_tiles`.")
    longest = max(tile_memory // (x.element_size() * width), 1)
    length = max(math.ceil(tokens / math.ceil(tokens / longest)), 1) if tokens else 1
    multiple = 128  # the tile of a matrix product
    return min(-(-length // multiple) * multiple, longest) if length > multiple else length


def tiled_mlp(
    mlp_forward: Forward,
    module: nn.Module,
    x: torch.Tensor,
    num_tiles: int | None = None,
    tile_memory: int = DEFAULT_TILE_MEMORY,
    *,
    preserve_rng_state: bool = True,
) -> torch.Tensor:
    """``mlp_forward(module, x)`` in tiles of tokens, each recomputed in the backward.

    This is a checkpoint of the MLP. A non-reentrant checkpoint around the whole layer does not run the MLP a third time
    if the layer ends with the MLP and a residual addition; a reentrant one does, and so does any if a norm follows.

    Args:
        mlp_forward: Computes the MLP from `module` and a tile, (..., tile, hidden) with as many dimensions as `x`: one
            vector per token, independent of other tokens and the same in each call. Not `module`'s own forward if that
            calls `tiled_mlp`.
        module: Holds the parameters, all of which must be present at the call and in one unit of FSDP.
        x: (..., tokens, hidden), of at least two dimensions; tiles run across the leading ones.
        num_tiles: Number of tiles; None for as few as keep a tile within `tile_memory`.
        tile_memory: Bytes that the intermediates of a tile may take (an estimate; see `tile_length`). Tiles of 4096
            tokens and more keep matrix products at full speed.
        preserve_rng_state: Recompute with the random numbers of the forward. Off for MLPs without dropout: the random
            state is then neither read nor restored, which CUDA graphs need.

    Returns:
        The results of `mlp_forward` for all tokens. Under ``torch.compile`` each tile is a checkpoint of torch.

    Raises:
        ValueError: If `x` has fewer than two dimensions, the size of a tile is not positive or cannot be estimated, the
            parameters are partitioned by DeepSpeed ZeRO-3, or `mlp_forward` does not return one vector per token.
        RuntimeError: if the backward runs with ``create_graph=True``.
    """
    if x.dim() < 2:
        raise ValueError(f"`x` is {tuple(x.shape)}; it must be (..., tokens, hidden).")
    length = tile_length(module, x, num_tiles, tile_memory)
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            "The parameters of `module` are partitioned by DeepSpeed ZeRO-3, which gathers them for one forward at a "
            "time; use FSDP2 or ZeRO-2 with tiled_mlp."
        )
    if torch.compiler.is_compiling():
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        tiles = [checkpoint(mlp_forward, module, tile, **options) for tile in _tiles(x, length)]
        y = torch.cat(tiles, dim=-2)
        return y.view(*x.shape[:-1], y.shape[-1])
    call = _Call(mlp_forward, module)
    if not torch.is_grad_enabled() or not (x.requires_grad or named):
        if x.numel() <= length * x.shape[-1]:
            return mlp_forward(module, x)  # such as a single token in generation
        return _forward_in_tiles(lambda tile: call.with_parameters({}, tile), x, length)
    saving: list[Any] = []
    source = x if x.requires_grad else x.detach().requires_grad_()  # a node whose input needs no gradient saves nothing
    values = tuple(named.values())
    return _Tiled.apply(
        *(_SaveInput.apply(source, values, saving), call, tuple(named), saving[0], x.requires_grad, length),
        *(preserve_rng_state, *values),
    )
