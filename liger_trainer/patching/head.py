"""The LM head: it defers its logits, after a proof against ``nn.Linear`` on a small random input.

Two instances get a forward of ours: the head (`head/forward.py`), and the model whose forward computes the loss
(`model_forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head.forward import make_head_forward, make_split_head_forward, never_a_frame
from liger_trainer.head.lm_head import (
    adapts_tied_weight,
    find_lm_heads,
    is_plain_linear,
    without_adapters,
)
from liger_trainer.head.step import Forward, current_step, running
from liger_trainer.head.vocab_parallel import gathering_forward
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.patching.binding import bind_forward, bound_function, overriding_forward, unbind_forward
from liger_trainer.patching.inputs import AS_DRAWN, HEAD
from liger_trainer.patching.model_forward import (
    foreign_forward,
    is_patched_model,
    make_model_forward,
    native_forward,
)
from liger_trainer.patching.probe import neutral, projection
from liger_trainer.patching.report import KernelReportRow
from liger_trainer.patching.trial import relative_difference

TOLERANCE = 5e-3
"""Largest relative difference allowed: fp32 gives about 1e-6, TensorFloat-32 about 1e-3."""

_BATCH, _LENGTH, _HIDDEN, _VOCAB = 2, 8, 32, 48


def patch_head(model: nn.Module, *, fused: bool, logits_memory: int, in_fp32: bool = False) -> KernelReportRow:
    """Makes `model` train without building its logits, or with a faster cross entropy on them.

    Args:
        model: The causal LM (or any model that calls its output embedding, or its `lm_head`), or a PEFT model around
            one. Patching it again changes `fused` and `logits_memory`.
        fused: True runs the head fused with its cross entropy (`linear_cross_entropy`); False builds the logits only
            for the loss and runs the `cross_entropy` kernel on them.
        logits_memory: Bytes that the fused operator may use for a chunk of logits.
        in_fp32: Whether the head casts its hidden states to fp32; its parameters are then fp32.

    Returns:
        A row for the report: what was bound and the probe's error, or why the head was left alone.

    Raises:
        ValueError: if `logits_memory` does not hold the logits of one token.
    """
    component = "linear_cross_entropy" if fused else "cross_entropy"
    model = without_adapters(model)
    heads, reason = find_lm_heads(model)
    target = type(heads[0]).__name__ if heads else type(model).__name__

    def left_alone(why: str, error: float | None = None) -> KernelReportRow:
        return KernelReportRow(component, target, len(heads), None, error, why)

    if not heads:
        return left_alone(reason)
    whole_module = not all(map(is_plain_linear, heads))
    if whole_module and not fused:
        return left_alone(f"{type(heads[0]).__name__} is not a plain nn.Linear; it runs as it is, with full logits")
    ours = is_patched_model(model)
    foreign = None if ours else foreign_forward(model)
    gathering = [gathering_forward(head) for head in heads]  # if tensor parallelism splits them
    for head, over in zip(heads, gathering):
        foreign = foreign or (None if over is not None else overriding_forward(head))
    if foreign is not None:
        return left_alone(foreign)
    native = native_forward(model)

    if fused:
        check_logits_memory(int(logits_memory), getattr(heads[0], "out_features", 0))
    forward = make_head_forward(fused, int(logits_memory), whole_module, in_fp32)
    # Not `heads[0].weight.device`: PEFT may compute the weight of a wrapper on access.
    device = next(heads[0].parameters()).device
    has_bias = not whole_module and heads[0].bias is not None
    try:
        error = probe_head(forward, has_bias, device if device.type != "meta" else torch.device("cpu"))
    except Exception as failure:  # of a device or a compiler, of any kind: the model then trains as before
        return left_alone(f"the probe failed: {type(failure).__name__}: {failure}")
    if not error <= TOLERANCE:
        return left_alone("the probe's loss or gradients differ", error)
    for head, over in zip(heads, gathering):
        unbind_forward(head)
        if over is None:
            bind_forward(head, forward, live=None)
            never_a_frame(bound_function(head))
        else:
            bind_forward(head, make_split_head_forward(over, fused, int(logits_memory)), over)
    if not ours:
        bind_forward(model, make_model_forward(native), live=None)
        never_a_frame(bound_function(model))  # the graph breaks inside
    memory = f"(logits_memory={int(logits_memory) / 2**20:g} MiB)"
    kernel = f"linear_cross_entropy {memory}" if fused else "cross_entropy"
    kernel += ", vocabulary parallel" if any(gathering) else ""
    if whole_module:
        kernel = f"cross_entropy on chunks of {type(heads[0]).__name__} {memory}"
    remark = "tied to the embedding, and adapted: untie it before a merge" if adapts_tied_weight(model) else ""
    return KernelReportRow(component, f"{type(model).__name__} head", len(heads), kernel, error, remark)


def check_logits_memory(logits_memory: int, vocab: int) -> None:
    """Checks that a chunk holds the logits of one token.

    Args:
        logits_memory: Bytes of a chunk of logits.
        vocab: Size V of the vocabulary; 0 where it is not known.

    Raises:
        ValueError: if it does not.
    """
    if logits_memory < 2 * vocab:
        raise ValueError(
            f"`logits_memory` is {logits_memory} bytes, but the logits of one token are {vocab} numbers of 2 bytes or "
            "more. Give a size with its unit, such as '512MiB'."
        )


def probe_head(forward: Callable, has_bias: bool, device: torch.device) -> float:
    """Compares the loss and the gradients of a small head with `forward` and without it.

    Args:
        forward: The head's forward to prove.
        has_bias: Whether the model's head has a bias.
        device: Where the model's head is.

    Returns:
        The largest difference of the loss and the gradients of hidden states, weight and bias, each relative to the
        largest native value: on inputs of about 1, or on the first of those listed for the head (`inputs.py`) where it
        is more than `TOLERANCE`.
    """
    generator = torch.Generator("cpu").manual_seed(0)  # the global random state does not change

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device)

    def results(patched: bool, hidden: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight, bias)[: 3 if has_bias else 2]]
        head = projection(leaves[1], nn.Linear)
        head._parameters["bias"] = leaves[2] if has_bias else None  # type: ignore[assignment]
        if patched:
            bind_forward(head, forward, live=None)
        with running(replace(current_step(), forward=Forward(has_labels=True), expected_gradient=None)):
            logits = head(leaves[0]).float().view(-1, _VOCAB)
            loss = F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    errors: list[float] = []
    with neutral(device):
        weight, bias, hidden = draw(_VOCAB, _HIDDEN) / 4, draw(_VOCAB), draw(_BATCH, _LENGTH, _HIDDEN)
        target = torch.randint(0, _VOCAB, (_BATCH * _LENGTH,), generator=generator, device="cpu")
        target[:3] = IGNORE_INDEX
        target = target.to(device)
        for case in (AS_DRAWN, *HEAD):
            (states,) = case.change([hidden])
            native, ours = results(False, states), results(True, states)
            errors.append(max(map(relative_difference, native, ours)))
            if not errors[-1] <= TOLERANCE:
                return errors[-1]
    return errors[0]  # logits of a few hundred make more of the rounding
