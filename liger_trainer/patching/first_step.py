"""The kernels of a fused head that is trained, compiled beside those of the proofs.

Its proof has a vocabulary of its own, and comes when all else is bound; Triton compiles a kernel anew for the sizes of
a model. So the head runs once more while the other proofs do, with a narrow weight of as many rows as the model's. The
kernels that it launches are compiled, and do not run. What it computes is thrown away.

On Hopper the gradient of its weight has three kernels, which take longest of all to compile. Those of the rows of
logits are the ones of a loss alone: TRL's trainers, which log more of a token, launch others.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from liger_trainer.head.lm_head import PLAIN, find_lm_heads, is_plain_linear, without_adapters
from liger_trainer.kernels.compile_together import Compiler
from liger_trainer.kernels.head.head_chunks import COLUMN_MULTIPLE
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy

# A head so narrow, with chunks of so few tokens, has a large first chunk and then four others, as many launches as any.
_WIDTH, _CHUNK = 128, 32


def note_head(model: nn.Module, compiler: Compiler | None, device: torch.device) -> None:
    """Has `compiler` compile what the fused head of `model` launches in a step; inside of `Probe.isolated`.

    Left to the step are heads that are frozen, which have two kernels, those in fp32, which run under autocast, and
    those that are quantised, sharded or offloaded.

    Args:
        model: The model.
        compiler: None does nothing.
        device: The device on which proofs run.
    """
    if compiler is None:
        return
    with compiler.noting(), contextlib.suppress(Exception):  # whatever fails is left to the step
        heads, _ = find_lm_heads(without_adapters(model))
        if heads and is_plain_linear(heads[0]) and all(_is_usual(each, device) for each in heads[0].parameters()):
            _run(heads[0], getattr(getattr(model, "config", None), "final_logit_softcapping", None))


def _is_usual(tensor: torch.Tensor, device: torch.device) -> bool:
    trained = tensor.dtype in (torch.bfloat16, torch.float16) and tensor.requires_grad
    return trained and type(tensor) in PLAIN and tensor.device == device and tensor.numel() > 0


def _run(head: Any, softcap: float | None) -> None:
    weight, bias = head.weight, head.bias
    narrow = weight.new_empty(weight.shape[0], _WIDTH).requires_grad_()
    hidden = weight.new_empty(1, 2 * _WIDTH, _WIDTH).requires_grad_()
    loss: Any = linear_cross_entropy(
        hidden,
        narrow,
        torch.zeros(hidden.shape[:-1], dtype=torch.long, device=weight.device),
        None if bias is None else bias.detach().requires_grad_(),
        softcap=softcap,
        logits_memory=_CHUNK * (weight.shape[0] + COLUMN_MULTIPLE) * weight.element_size(),
    )
    loss.backward()
