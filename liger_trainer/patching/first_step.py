"""The kernels of the first step, compiled beside those of the proofs.

A proof asks for the gradients of all tensors, and has the sizes of a dummy; Triton compiles a kernel anew for the sizes
of a model and for frozen weights. So the norms, MLPs and attentions of a model run once more, one of each kind, with
their own weights and what will be bound to them, and so does the fused head, with a narrow weight of as many rows. The
kernels that they launch are compiled, and do not run. What is computed is thrown away.

Nothing of the model changes: stand-ins run, which have no hooks, copies of all else, and parameters that share the
memory of the model's. Left out is what could use the result of a kernel to index memory, as experts do, or keep it, as
quantised layers do. Whatever fails is left to the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.head.lm_head import PLAIN, find_lm_heads, is_plain_linear, without_adapters
from liger_trainer.kernels.compile_together import Compiler
from liger_trainer.kernels.head.head_chunks import COLUMN_MULTIPLE
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.patching.probe import arguments_of, dummy_module
from liger_trainer.patching.report import Finding

_ATTENTION = "rope"
_COMPONENTS = (_ATTENTION, "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")
_HALF = (torch.bfloat16, torch.float16)
_BATCH, _LENGTH = 2, 512
# A head so narrow, with chunks of so few tokens, has a large first chunk and then four others, as many launches as any.
_WIDTH, _CHUNK = 128, 32

_Bound = dict[int, list[Finding]]
"""What will be bound to a module, by its identity."""


def note_first_step(
    model: nn.Module, findings: Sequence[Finding], compiler: Compiler | None, device: torch.device, fused: bool
) -> None:
    """Has `compiler` compile what a step of `model` launches; inside of `Probe.isolated`.

    Args:
        model: The model, to which nothing is bound yet.
        findings: What will be bound.
        compiler: None does nothing, nor does a model that is not trained.
        device: That of the probe.
        fused: Whether the head will run fused with its cross entropy.
    """
    if compiler is None or not any(each.requires_grad for each in model.parameters()):
        return
    with contextlib.suppress(Exception):
        for run in _runs(model, findings, device, fused):
            with compiler.noting(), contextlib.suppress(Exception):
                run()


def _runs(
    model: nn.Module, findings: Sequence[Finding], device: torch.device, fused: bool
) -> Iterator[Callable[[], None]]:
    if fused:  # first, as these take longest to compile
        yield functools.partial(_run_head, model, device)
    yield from _runs_of_modules(model, findings, device)


def _is_usual(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether these are ordinary, on `device`, and some of half precision: not quantised, sharded or offloaded."""
    dtypes = {each.dtype for each in tensors}
    usual = (type(each) in PLAIN and each.device == device and each.numel() for each in tensors)
    return dtypes <= {*_HALF, torch.float32} and not dtypes.isdisjoint(_HALF) and all(usual)


# ---------------------------------------------------------------------------------------------------------------------
# The head
# ---------------------------------------------------------------------------------------------------------------------


def _run_head(model: nn.Module, device: torch.device) -> None:
    model = without_adapters(model)
    heads, _ = find_lm_heads(model)
    if not heads or not is_plain_linear(heads[0]) or not _is_usual([*heads[0].parameters()], device):
        return
    weight, bias = heads[0].weight, heads[0].bias
    narrow = weight.new_empty(weight.shape[0], _WIDTH).requires_grad_(weight.requires_grad)
    hidden = weight.new_empty(1, 2 * _WIDTH, _WIDTH).requires_grad_()
    memory = _CHUNK * (weight.shape[0] + COLUMN_MULTIPLE) * weight.element_size()
    loss: Any = linear_cross_entropy(
        hidden,
        narrow,
        torch.zeros(hidden.shape[:-1], dtype=torch.long, device=device),
        None if bias is None else bias.detach().requires_grad_(bias.requires_grad),
        softcap=getattr(getattr(model, "config", None), "final_logit_softcapping", None),
        logits_memory=memory,
    )
    loss.backward()


# ---------------------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------------------


def _runs_of_modules(
    model: nn.Module, findings: Sequence[Finding], device: torch.device
) -> Iterator[Callable[[], None]]:
    """What runs a module of each kind, forward and backward."""
    applied = [each for each in findings if each.forward is not None and each.component != "attention"]
    if any(each.component == "fp8" for each in applied):  # its layers keep what they have cast
        return
    bound: _Bound = {}
    for finding in applied:
        bound.setdefault(id(finding.module), []).append(finding)
    # The norms of queries and keys run in their attention.
    inside = {id(child) for each in applied if each.component == _ATTENTION for child in each.module.children()}
    kinds = set()
    for finding in applied:
        if finding.component in _COMPONENTS and id(finding.module) not in inside:
            kind = _kind(finding)
            if kind not in kinds and _is_usual([*finding.module.parameters(), *finding.module.buffers()], device):
                yield functools.partial(_run_module, model, finding, bound)
            kinds.add(kind)


def _kind(finding: Finding) -> Any:
    """A key that is equal for modules that launch the same kernels."""
    parameters = finding.module.named_parameters()
    shapes = ((name, each.shape, each.dtype, each.requires_grad) for name, each in parameters)
    return type(finding.module), finding.forward, *shapes


def _run_module(model: nn.Module, finding: Finding, bound: _Bound) -> None:
    stand_in: Any = _stand_in(finding.module, bound)
    weight = next(each for each in stand_in.parameters() if each.dtype in _HALF)
    sizes = (child.in_features for child in stand_in.children() if hasattr(child, "in_features"))
    x = weight.new_empty(_BATCH, _LENGTH, next(sizes, weight.shape[-1])).requires_grad_()
    if finding.component == _ATTENTION:
        if hasattr(stand_in, "config"):
            stand_in.config = _Eager(stand_in.config)
        tables = _tables_of(finding.module, model, x)
        result = stand_in(hidden_states=x, position_embeddings=tables, attention_mask=None)
    else:
        result = stand_in(x)
    result = result[0] if isinstance(result, tuple) else result
    result.backward(torch.ones_like(result))


def _stand_in(module: nn.Module, bound: _Bound) -> nn.Module:
    """A module that shares the memory of the parameters of `module`, with what will be bound to it, without hooks."""
    parameters = {
        name: each if each is None else nn.Parameter(each.detach(), each.requires_grad)
        for name, each in module._parameters.items()
    }
    children = {name: _stand_in(child, bound) for name, child in module._modules.items() if child is not None}
    stand_in = dummy_module(module, parameters, children)  # which trains, as the model will
    stand_in._buffers.update({name: each if each is None else each.clone() for name, each in module._buffers.items()})
    for finding in bound.get(id(module), ()):
        finding.bind(stand_in, finding.forward)  # type: ignore[arg-type]
    return stand_in


def _tables_of(attention: nn.Module, model: nn.Module, x: torch.Tensor) -> Any:
    """The rotary tables of `attention`, from what makes them: the nearest one beside a module that holds it."""
    name = next(name for name, module in model.named_modules() if module is attention)
    while name:
        name = name.rpartition(".")[0]
        for child in model.get_submodule(name).children():
            if any(buffer.endswith("inv_freq") for buffer in child._buffers):
                kind = {"layer_type": attention.layer_type} if "layer_type" in arguments_of(child) else {}
                return _stand_in(child, {})(x, torch.arange(_LENGTH, device=x.device)[None], **kind)
    raise LookupError("no rotary tables")


class _Eager:
    """A view of a config that names the attention of plain torch: another may be compiled, or wait for a process."""

    _attn_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)
