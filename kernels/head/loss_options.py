"""Options that the losses over logits or an LM head share, the checks of arguments, class weights and the normaliser.

A `check_*` function raises a ValueError that names the argument, what it is and what is allowed.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

IGNORE_INDEX = -100
"""The label of a token that does not count, by default: that of torch, transformers and TRL."""


CROSS_ENTROPY_OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")
REDUCTIONS = ("mean", "sum", "none")


class LossOptions(NamedTuple):
    """The options of one token's loss, which its public function makes and everything below passes on.

    Args:
        ignore_index: Tokens with this label give no loss and no gradient.
        label_smoothing: The share of the loss that is spread over all classes.
        z_loss: Factor of ``lse**2``.
        softcap: Soft-cap of the logits, or None.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: float


def check_outputs(outputs: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises ValueError unless `outputs` are names among `allowed`."""
    if isinstance(outputs, str):
        raise ValueError(f"`outputs` is the string {outputs!r}; give a tuple of names, such as ({outputs!r},).")
    unknown = [name for name in outputs if name not in allowed]
    if unknown:
        raise ValueError(f"`outputs` names {unknown}; the allowed names are {', '.join(map(repr, allowed))}.")


def check_transform(temperature: float, **softcaps: float | None) -> None:
    """Raises ValueError unless the temperature and the soft-caps, given by their arguments' names, are above 0."""
    if not temperature > 0.0:
        raise ValueError(f"`temperature` is {temperature}; it must be more than 0.")
    for name, softcap in softcaps.items():
        if softcap is not None and not softcap > 0.0:
            raise ValueError(f"`{name}` is {softcap}; it must be more than 0, or None for no soft-cap.")


def check_num_items(num_items: int | float | torch.Tensor | None) -> None:
    """Raises ValueError for a tensor of several elements or a negative number."""
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"`num_items` has shape {tuple(num_items.shape)}; it must be a number or a 0-d tensor.")
    elif num_items is not None and num_items < 0:
        raise ValueError(f"`num_items` is {num_items}; it must be 0 or more.")


def check_logits_memory(logits_memory: int) -> None:
    """Raises ValueError for a budget below one byte."""
    if logits_memory < 1:
        raise ValueError(f"`logits_memory` is {logits_memory}; it must be at least 1 byte.")


def check_retain_memory(retain_memory: int | None) -> None:
    """Raises ValueError for a negative budget."""
    if retain_memory is not None and retain_memory < 0:
        raise ValueError(f"`retain_memory` is {retain_memory}; it must be 0 bytes or more, or None.")


def check_head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, model: str = "") -> None:
    """Raises ValueError unless hidden states, head and bias fit; `model` is the prefix of their argument names."""
    hidden_name, weight_name, bias_name = f"`{model}hidden`", f"`{model}weight`", f"`{model}bias`"
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"{hidden_name} of shape {tuple(hidden.shape)} and {weight_name} of shape {tuple(weight.shape)} do not "
            "fit; they must be (..., H) and (V, H), with H at least 1."
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"{hidden_name} has dtype {hidden.dtype} and {weight_name} {weight.dtype}; both must be the same "
            "floating dtype, so cast one of them, or use autocast."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"{bias_name} has shape {tuple(bias.shape)} and dtype {bias.dtype}; "
            f"it must be floating of ({weight.shape[0]},)."
        )
    for name, tensor in ((weight_name, weight), (bias_name, bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{hidden_name} is on {hidden.device} but {name} on {tensor.device}; move one of them.")


def check_target(target: torch.Tensor, shape: torch.Size, vocab_size: int, like: torch.Tensor, name: str) -> None:
    """Raises ValueError unless `target` holds one integer label for each row of `like`, the argument called `name`."""
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`target` has dtype {target.dtype}; class ids must be int64 or int32.")
    if target.shape != shape:
        raise ValueError(
            f"`target` has shape {tuple(target.shape)}; `{name}` of shape {tuple(like.shape)} needs {tuple(shape)}."
        )
    if target.device != like.device:
        raise ValueError(f"`target` is on {target.device} but `{name}` on {like.device}; move it there.")
    if vocab_size < 1:
        raise ValueError("The vocabulary is empty; there must be at least one class.")


def check_logits(logits: torch.Tensor, target: torch.Tensor, name: str = "logits") -> None:
    """Raises ValueError unless `logits`, the argument called `name`, are floats of (..., V) that `target` fits."""
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"`{name}` has shape {tuple(logits.shape)} and dtype {logits.dtype}; give floats of (..., V).")
    check_target(target, logits.shape[:-1], logits.shape[-1], logits, name)


def check_tokens(name: str, tensor: torch.Tensor | None, hidden: torch.Tensor, integer: bool) -> None:
    """Raises ValueError unless `tensor`, called `name`, is None or holds one number for each token of `hidden`."""
    if tensor is None:
        return
    if tensor.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`{name}` has shape {tuple(tensor.shape)}; hidden states of shape {tuple(hidden.shape)} need "
            f"{tuple(hidden.shape[:-1])}."
        )
    if integer and tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`{name}` has dtype {tensor.dtype}; class ids must be int64 or int32.")
    if not integer and not tensor.is_floating_point():
        raise ValueError(f"`{name}` has dtype {tensor.dtype}; it must be floating.")
    if tensor.device != hidden.device:
        raise ValueError(f"`{name}` is on {tensor.device} but the hidden states on {hidden.device}; move it there.")


def check_linear(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, logits_memory: int
) -> None:
    """Raises ValueError unless hidden states, head, bias and target fit, and `logits_memory` is at least one byte."""
    check_head(hidden, weight, bias)
    check_logits_memory(logits_memory)
    check_target(target, hidden.shape[:-1], weight.shape[0], hidden, "hidden")


def check_options(
    options: LossOptions,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    outputs: Sequence[str],
) -> None:
    """Raises ValueError unless every option of a cross entropy is in its range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"`reduction` is {reduction!r}; it must be one of {', '.join(map(repr, REDUCTIONS))}.")
    check_outputs(outputs, CROSS_ENTROPY_OUTPUTS)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing` is {options.label_smoothing}; it must lie in [0, 1].")
    check_transform(options.temperature, softcap=options.softcap)
    if num_items is not None and reduction == "none":
        raise ValueError("`num_items` is given with reduction='none', which divides by nothing; use 'sum' or 'mean'.")
    check_num_items(num_items)


@torch.no_grad()
def checked_class_weights(
    weights: torch.Tensor | None,
    vocab_size: int,
    like: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    average: bool,
) -> torch.Tensor | None:
    """`weights` as a contiguous tensor of the computing dtype; for an `average`, divided by their mean over the labels.

    Raises:
        ValueError: If its shape is not ``(vocab_size,)``, its dtype not floating, or its device another one.
    """
    if weights is None:
        return None
    if weights.shape != (vocab_size,) or not weights.is_floating_point():
        raise ValueError(
            f"`class_weights` has shape {tuple(weights.shape)} and dtype {weights.dtype}; "
            f"it must be a floating tensor of shape ({vocab_size},)."
        )
    if weights.device != like.device:
        raise ValueError(f"`class_weights` is on {weights.device} but the logits on {like.device}; move it there.")
    weights = weights.to(torch.promote_types(like.dtype, torch.float32)).contiguous()
    if not average:
        return weights
    valid = target != ignore_index
    total = torch.where(valid, weights[target.clamp(0, vocab_size - 1)], 0.0).sum()
    return torch.where(total == 0, 0.0, weights * (valid.sum() / total))


@torch.no_grad()
def inverse_normalizer(
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """1 / normaliser as a 0-d tensor on the device of `target`, 0 if the normaliser is 0; nothing is synchronised."""
    one = torch.ones((), dtype=dtype, device=target.device)
    if isinstance(num_items, torch.Tensor):
        if num_items.device.type != "cpu" and num_items.device != target.device:
            num_items = num_items.to(target.device, non_blocking=True)
        # A 0-d CPU tensor enters a device operation by value, without a copy that would wait.
        total = one * num_items.reshape(())
    elif num_items is not None:
        total = one * num_items
    elif reduction == "mean":
        total = (target != ignore_index).sum().to(dtype)
    else:
        return one
    return torch.where(total == 0, 0.0, 1.0 / total)
