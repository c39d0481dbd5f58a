"""What shows in the first step alone: what a user's loss divides by, and layers that give their input no gradient.

The Trainer takes for granted that a user's loss divides by the labels of the whole step. Layers that multiply codes may
give no gradient, where something in front of them trains.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.head.deferred_logits import DeferredLogits, recordable
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.head.recorded import tree_map
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.codes import is_code, own_tensors
from liger_trainer.patching.probe import identity
from liger_trainer.trainers.checkpoints.run_state import random_numbers, set_random_numbers
from liger_trainer.trainers.checks.copied_function import copied_function
from liger_trainer.trainers.step import process_scale

logger = logging.getLogger("liger_trainer")

_TOLERANCE = 0.05
"""How far from a half the loss with twice the count may be, relative to it: terms that are means of their own."""


def defines_in_subclass(trainer: Any, *names: str) -> bool:
    """Whether a subclass of the user's has one of these methods in the place of that of TRL's or our `trainer`."""
    known = tuple(f"{library}." for library in ("liger_trainer", "trl", "transformers"))
    users = (kind for kind in type(trainer).__mro__ if not kind.__module__.startswith(known))
    return any(name in vars(kind) for kind in users for name in names)


class UsersLoss:
    """Looks once at the function: with twice the count, its loss has to be half as large.

    If it is not, such as for a mean over the labels of the micro-batch, the gradients of a step are too large by the
    number of its micro-batches.
    """

    def __init__(self) -> None:
        self._looked = False

    @contextlib.contextmanager
    def looked_at(self, trainer: Any, num_items: torch.Tensor | int | None) -> Iterator[None]:
        """Around the loss of a micro-batch of `num_items` labels in the whole step."""
        function = trainer.compute_loss_func
        looks = not self._looked and callable(function) and trainer.model.training and num_items is not None
        if not looks or trainer.loss_is_scaled_for_ga is not None:  # set by a user who says who divides
            yield
            return
        assert num_items is not None
        parts = getattr(trainer, "current_gradient_accumulation_steps", 1) * process_scale(trainer, num_items)
        if parts == 1:  # where a mean is right
            yield
            return
        self._looked = True
        copy, says = copied_function(function), trainer.is_world_process_zero()
        if copy is None:
            if says:
                logger.warning(
                    "`compute_loss_func` holds what cannot be copied, so it has not been tried with another "
                    "`num_items_in_batch`. The Trainer adds up the losses of a step: the summed loss of the labels has "
                    "to be divided by it. (Said once.)"
                )
            yield
            return
        trainer.compute_loss_func = _compared(function, copy, parts, says)
        try:
            yield
        finally:
            trainer.compute_loss_func = function


def _compared(function: Callable[..., Any], copy: Callable[..., Any], parts: int, says: bool) -> Callable[..., Any]:
    """`function`, whose `copy` also computes the loss with twice the count, and `says` so if it is not half."""

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        half = _without_a_trace(copy, outputs, labels, 2 * num_items_in_batch)
        loss = function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if says and half is not None and isinstance(loss, torch.Tensor):
            whole = float(loss.detach())
            if abs(2 * half - whole) > _TOLERANCE * abs(whole):
                logger.warning(
                    "`compute_loss_func` returns %.4g, and %.4g with twice the `num_items_in_batch`, where half is "
                    "expected. The Trainer adds up the losses of a step: where each is a mean over its micro-batch, "
                    "the gradients are %s times too large. Divide the summed loss of the labels by "
                    "`num_items_in_batch`. (Said once.)",
                    *(whole, half, parts),
                )
        return loss

    return compute_loss


def _without_a_trace(function: Callable[..., Any], outputs: Any, labels: Any, num_items: Any) -> float | None:
    """The loss of copies, with the random numbers that the next call gets too; None if it cannot be computed."""
    numbers = random_numbers()
    device = next((t.device for t in (labels, num_items) if isinstance(t, torch.Tensor) and t.is_cuda), None)
    try:
        with torch.no_grad(), torch.random.fork_rng([] if device is None else [device]):
            return float(function(tree_map(_copy, outputs), _copy(labels), num_items_in_batch=num_items))
    except Exception:  # the call that counts raises it again, or works on what was not copied
        return None
    finally:
        set_random_numbers(numbers)


def _copy(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        deferred = recordable(value)
        return value.build().detach().clone() if deferred is None else deferred.derive(deferred.meta, detached=True)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


CURE = (
    "Keep the base packed (`packed_base=True` with the checkpoint's name, or `load_packed`), load it dequantised "
    "(`dequantize=True` in the class of its `quantization_config`), or load another checkpoint of it."
)
_UNKNOWN = (
    " Where nothing below it trains, it may stay, which only checkpoints with "
    "`gradient_checkpointing_kwargs={'use_reentrant': False}` show."
)
_Called = dict[nn.Module, bool | None]
"""Of each layer that was called, whether something in front of it trains; None if that is not known."""

_ROWS = 16  # of the input that a layer is tried with


@contextlib.contextmanager
def uncut_gradients(model: nn.Module) -> Iterator[None]:
    """Checks, after a forward and backward of `model` in the context, that no layer has cut a gradient.

    A layer that cuts gradients may stay where it has been called with inputs that depend on nothing trained, such as
    behind frozen embeddings.
    """
    cutting = dict(_cutting_layers(model))
    called: _Called = {}

    def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if called.get(layer, False) is False:
            # Without gradients, as in a reentrant checkpoint, an input does not show what it depends on.
            inputs = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            called[layer] = any(map(_depends_on_trained, inputs)) if torch.is_grad_enabled() else None

    handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in cutting.values()]
    try:
        yield
    except RuntimeError:  # torch's, for a loss without any gradient
        _check(cutting, called)
        raise
    finally:
        for handle in handles:
            handle.remove()
    _check(cutting, called)


def _check(cutting: dict[str, nn.Module], called: _Called) -> None:
    """Raises ValueError for the first layer with trained weights in front, or of which it is not known."""
    for name, layer in cutting.items():
        trains = called.get(layer, True)
        if trains is not False:
            foreign = overriding_forward(layer)
            weight = _weight(layer)
            how = "its forward is not that of its class" if foreign else f"it is a {type(layer).__name__}"
            how += f", its weight of type {type(weight).__name__}" if type(weight) is not nn.Parameter else ""
            raise ValueError(
                f"{name!r} passes no gradient to its input ({how}), so the layers below it would train on wrong "
                f"gradients, or not at all. {CURE}{_UNKNOWN if trains is None else ''}"
            )


def _cutting_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that multiply codes, or what they stand for, and give their input no gradient.

    Of those with the same class, forward, attributes and shapes, one is tried.
    """
    tried: dict[tuple[Any, ...], bool] = {}
    quantised = getattr(without_adapters(model), "hf_quantizer", None) is not None
    for name, layer in model.named_modules():
        weight, features = _weight(layer), getattr(layer, "in_features", None)
        if not isinstance(features, int) or not isinstance(weight, torch.Tensor) or hasattr(layer, "base_layer"):
            continue
        foreign = overriding_forward(layer)
        if is_dtensor(weight) or weight.is_meta or not weight.numel() or not _is_low_bit(layer, quantised, foreign):
            continue
        kind = (foreign, type(weight), weight.dtype, *identity(layer))
        if kind not in tried:
            tried[kind] = _cuts(layer, features, weight.device, _dtype_of(model))
        if tried[kind]:
            yield name, layer


def _weight(layer: nn.Module) -> Any:
    # Not `layer.weight`, which may be a property that computes it, and whose name is the format's.
    tensors = own_tensors(layer)
    return tensors.get("weight", next(iter(tensors.values()), None))


def _depends_on_trained(tensor: torch.Tensor) -> bool:
    """Whether a gradient of `tensor` would reach a parameter.

    What ends elsewhere is an input without weights, such as embeddings of which checkpoints ask for a gradient.
    """
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        return True
    waiting, seen = [tensor.grad_fn], {None}
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        waiting += [before for before, _ in node.next_functions]
    return False


def _is_low_bit(layer: nn.Module, quantised: bool, foreign: str | None) -> bool:
    """Whether `layer` may multiply codes; in a model with a quantizer, any layer that is not a plain one may."""
    tensors = own_tensors(layer)
    if any(is_code(each) or "scale" in name for name, each in tensors.items()):
        return True
    plain = all(type(each) in (nn.Parameter, torch.Tensor) for each in tensors.values())
    return not plain or (quantised and (foreign is not None or type(layer) is not nn.Linear))


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype in which the base of `model` computes."""
    base = without_adapters(model)
    wide = (each.dtype for each in base.parameters() if each.is_floating_point() and each.element_size() > 1)
    return next(wide, torch.float32)


def _cuts(layer: Any, features: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the output of `layer` does not depend on its input, as autograd sees it."""
    with torch.enable_grad():
        x = torch.ones(_ROWS, features, device=device, dtype=dtype, requires_grad=True)
        try:
            y = layer.forward(x)
            found = torch.autograd.grad(y.sum(), x, allow_unused=True)[0] if y.requires_grad else None
        except Exception:  # it takes something else, or has said itself that it has no gradient
            return False
    return found is None
