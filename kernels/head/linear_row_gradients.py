"""The gradients of row statistics over a head as operators, for upstream gradients that come later (`_linear_rows`)."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.head.cross_entropy_options import OPTIONS_SCHEMA, RowOptions, RowStats, Shard
from liger_trainer.kernels.head.head_chunks import Needs, allocate_gradients
from liger_trainer.kernels.head.linear_rows import linear_gradients
from liger_trainer.kernels.head.matmul_precision import fp32_reductions
from liger_trainer.kernels.runtime import graph_is_kept

_GRADIENT_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor nll, Tensor lse, Tensor entropy, "
    "Tensor{} kept, {}, int logits_memory, SymInt vocab_start, SymInt vocab_size"
)
_NEEDS = "bool hidden_gradient, bool weight_gradient, bool bias_gradient"


def _run_gradients(overwrite: bool, grad: Any, grad_entropy: Any, *arguments: Any) -> Any:
    hidden, weight, target, bias, nll, lse, entropy, kept, *rest = arguments
    stats = RowStats(nll, nll, lse, entropy if entropy.numel() else lse, lse)
    with fp32_reductions(weight):
        return linear_gradients(
            grad, grad_entropy, hidden, weight, target, bias, stats, kept, RowOptions(*rest[:6]), rest[6],
            Needs(*rest[9:]), Shard(*rest[7:9]), overwrite,
        )  # fmt: skip


@torch.library.custom_op(
    "liger_trainer::linear_rows_gradients",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? grad_entropy, {_GRADIENT_ARGUMENTS.format('', OPTIONS_SCHEMA)}, {_NEEDS}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _gradients(*arguments: Any) -> Any:
    """dX, dW and dbias for upstream gradients of the token losses and, unless None, of the entropies."""
    return _run_gradients(False, *arguments)


@torch.library.custom_op(
    "liger_trainer::linear_rows_gradients_",
    mutates_args={"kept"},
    schema=f"(Tensor grad, Tensor? grad_entropy, {_GRADIENT_ARGUMENTS.format('(a!)', OPTIONS_SCHEMA)}, {_NEEDS}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _gradients_(*arguments: Any) -> Any:
    """As `_gradients`, in the memory of the kept logits."""
    return _run_gradients(True, *arguments)


@_gradients.register_fake
@_gradients_.register_fake
def _(grad: Any, grad_entropy: Any, hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any) -> Any:
    return allocate_gradients(hidden, weight, bias, Needs(*rest[-3:]))


@torch.library.custom_op(
    "liger_trainer::linear_rows_attach",
    mutates_args=(),
    schema=f"(Tensor loss, Tensor unit_gradient, {_GRADIENT_ARGUMENTS.format('', OPTIONS_SCHEMA)}, str group) "
    "-> (Tensor, Tensor)",
)
def attach_gradients(*arguments: Any) -> Any:
    """`loss` and `entropy`, known already, as differentiable functions of hidden, weight and bias.

    With the name of a process `group` each of its processes holds a shard of the vocabulary; dX is summed over them.
    """
    return arguments[0].clone(), arguments[8].clone()


@attach_gradients.register_fake
def _(*arguments: Any) -> Any:
    return torch.empty_like(arguments[0]), torch.empty_like(arguments[8])


def _attach_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:10])
    ctx.options, ctx.group = inputs[10:-1], inputs[-1]


def _attach_backward(
    ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    gradients: list[torch.Tensor | None] = [None, None, None]
    if grad is not None or grad_entropy is not None:
        unit_gradient, *saved = ctx.saved_tensors
        needs = Needs(*(ctx.needs_input_grad[index] for index in (2, 3, 5)))
        if unit_gradient.dim() == 2 and grad is not None and grad_entropy is None:
            refuse_double_backward("linear_log_probs")
            gradients[0] = _scaled_rows(unit_gradient, grad, saved[2] != ctx.options[0], saved[0])
        else:
            gradients = recomputed_gradients(grad, grad_entropy, (*saved, *ctx.options), needs)
            if ctx.group and gradients[0] is not None:
                gradients[0] = _all_reduce(gradients[0], ctx.group)
    d_hidden, d_weight, d_bias = gradients
    return (None, None, d_hidden, d_weight, None, d_bias, *(None,) * 14)


def recomputed_gradients(
    grad: torch.Tensor | None, grad_entropy: torch.Tensor | None, arguments: tuple[Any, ...], needs: Needs
) -> list[torch.Tensor | None]:
    """dX, dW and dbias, None where not needed, for upstream gradients of which at least one is there; in a backward.

    Args:
        grad: Upstream gradient of the token losses.
        grad_entropy: Upstream gradient of the entropies.
        arguments: Those of the operators above, from `hidden` to `vocab_size`.
        needs: The gradients.
    """
    refuse_double_backward("linear_log_probs")
    given = grad if grad is not None else grad_entropy
    assert given is not None
    if grad is None:
        grad = torch.zeros((), dtype=given.dtype, device=given.device).expand_as(given)
    retain = graph_is_kept() or type(given) is not torch.Tensor  # tracing sees fake or functional tensors
    compute = _gradients if retain else _gradients_
    computed = compute(grad, grad_entropy, *arguments, *needs)
    return [gradient if need else None for gradient, need in zip(computed, needs)]


def _scaled_rows(rows: torch.Tensor, factor: torch.Tensor, valid: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`rows` times a factor each, rounded once, to the dtype of `like`."""
    factor = torch.where(valid, factor, 0.0).unsqueeze(-1)
    return torch.mul(rows, factor, out=torch.empty_like(like))


def _all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))


attach_gradients.register_autograd(_attach_backward, setup_context=_attach_setup)
