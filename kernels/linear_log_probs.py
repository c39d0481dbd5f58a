"""Log-probability of every target token under an LM head, with the logits one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and labels t, with z the transformed logits (`cross_entropy_options`):

    log_probs[n] = z[n, t[n]] - lse[n]          entropy[n] = lse[n] - sum_c p[n, c] * z[n, c]
    dz[n, c]     = g[n] * ([c == t[n]] - p[n, c]) - e[n] * p[n, c] * (log p[n, c] + entropy[n])

for upstream gradients g of the log-probabilities and e of the entropies, which any loss may give: supervised,
preference or policy. Its backward is exact in the cheapest of the three ways of `_linear_rows`: logits kept up to a
budget, recomputed beyond it, or, for a frozen head, a gradient of size (N, H) made in the forward.

Bytes moved besides the matmuls' own, b bytes an element: N*V*b for the statistics and 2*N*V*b for the gradient, and
2*V*H*b for every chunk after the first, to accumulate dW. Saved for the backward are the inputs, two to three fp32
numbers a token, and the kept logits or the (N, H) gradient in fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels._linear_rows import (
    allocate_kept,
    kept_rows,
    linear_gradients,
    linear_statistics_,
)
from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.cross_entropy_options import (
    ExtraStats,
    RowOptions,
    RowStats,
    Shard,
    check_linear,
    check_options,
    compute_dtype,
)
from liger_trainer.kernels.cross_entropy_reference import transformed_logits
from liger_trainer.kernels.linear_cross_entropy_chunks import Needs, allocate_gradients
from liger_trainer.kernels.runtime import graph_is_kept

OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale, float temperature"


@dataclasses.dataclass
class LogProbsOutput:
    """Log-probabilities and the outputs that were asked for, all shaped as `target`; the others are None.

    Attributes:
        log_probs: fp32, log-probability of the target; 0 at ignored tokens, as are all others.
        entropy: fp32, of the distribution after scale, soft-cap and temperature; it has a gradient too.
        top1: bool, whether the target is the most likely id (the lowest of equals).
        mean_logit: fp32, mean of the transformed logits over the vocabulary, without gradient.
        sum_squared_probs: fp32, log of the sum of the squared probabilities, without gradient.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    top1: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    sum_squared_probs: torch.Tensor | None = None


@torch.library.custom_op(
    "liger_trainer::linear_log_probs_rows",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {_OPTIONS}, int logits_memory, SymInt keep, "
    "bool entropy, bool predicted, bool mean_logit, bool sum_squared_probs, bool unit_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rows(hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any) -> Any:
    """nll, lse, entropy and predicted of `RowStats`, both of `ExtraStats`, the kept logits and dnll/dhidden."""
    stats, extra, unit_gradient = _allocate_rows(hidden, target, *rest[8:])
    kept = linear_statistics_(
        hidden, weight, target, bias, RowOptions(*rest[:6]), rest[6], rest[7], stats, extra, unit_gradient
    )
    return (*stats[1:], *extra, kept, unit_gradient)


def _allocate_rows(
    hidden: torch.Tensor,
    target: torch.Tensor,
    entropy: bool,
    predicted: bool,
    mean_logit: bool,
    sum_squared_probs: bool,
    unit_gradient: bool,
) -> tuple[RowStats, ExtraStats, torch.Tensor]:
    tokens = target.numel()
    return (
        RowStats.allocate(hidden, tokens, entropy, predicted),
        ExtraStats.allocate(hidden, tokens, mean_logit, sum_squared_probs),
        # Not in the dtype of `hidden`: the product with the upstream gradient would be rounded a second time.
        torch.empty_like(hidden, dtype=compute_dtype(hidden)) if unit_gradient else hidden.new_empty(0),
    )


@_rows.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Any, *rest: Any) -> Any:
    stats, extra, unit_gradient = _allocate_rows(hidden, target, *rest[8:])
    return (*stats[1:], *extra, allocate_kept(hidden, weight, rest[7]), unit_gradient)


_GRADIENT_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor nll, Tensor lse, Tensor entropy, "
    "Tensor{} kept, {}, int logits_memory, SymInt vocab_start, SymInt vocab_size"
)
_NEEDS = "bool hidden_gradient, bool weight_gradient, bool bias_gradient"


def _run_gradients(overwrite: bool, grad: Any, grad_entropy: Any, *arguments: Any) -> Any:
    hidden, weight, target, bias, nll, lse, entropy, kept, *rest = arguments
    stats = RowStats(nll, nll, lse, entropy if entropy.numel() else lse, lse)
    return linear_gradients(
        grad, grad_entropy, hidden, weight, target, bias, stats, kept, RowOptions(*rest[:6]), rest[6],
        Needs(*rest[9:]), Shard(*rest[7:9]), overwrite,
    )  # fmt: skip


@torch.library.custom_op(
    "liger_trainer::linear_rows_gradients",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? grad_entropy, {_GRADIENT_ARGUMENTS.format('', _OPTIONS)}, {_NEEDS}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _gradients(*arguments: Any) -> Any:
    """dX, dW and dbias for upstream gradients of the token losses and, unless None, of the entropies."""
    return _run_gradients(False, *arguments)


@torch.library.custom_op(
    "liger_trainer::linear_rows_gradients_",
    mutates_args={"kept"},
    schema=f"(Tensor grad, Tensor? grad_entropy, {_GRADIENT_ARGUMENTS.format('(a!)', _OPTIONS)}, {_NEEDS}) "
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
    schema=f"(Tensor loss, Tensor unit_gradient, {_GRADIENT_ARGUMENTS.format('', _OPTIONS)}, str group) "
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
    given = grad if grad is not None else grad_entropy
    if given is not None:
        refuse_double_backward("linear_log_probs")
        unit_gradient, *saved = ctx.saved_tensors
        needs = Needs(*(ctx.needs_input_grad[index] for index in (2, 3, 5)))
        if unit_gradient.dim() == 2 and grad_entropy is None:
            gradients[0] = _scaled_rows(unit_gradient, given, saved[2] != ctx.options[0], saved[0])
        else:
            grad = torch.zeros((), dtype=given.dtype, device=given.device).expand_as(given) if grad is None else grad
            retain = graph_is_kept() or type(given) is not torch.Tensor  # tracing sees fake or functional tensors
            compute = _gradients if retain else _gradients_
            computed = compute(grad, grad_entropy, *saved, *ctx.options, *needs)
            gradients = [gradient if need else None for gradient, need in zip(computed, needs)]
            if ctx.group and gradients[0] is not None:
                gradients[0] = _all_reduce(gradients[0], ctx.group)
    d_hidden, d_weight, d_bias = gradients
    return (None, None, d_hidden, d_weight, None, d_bias, *(None,) * 14)


def _scaled_rows(rows: torch.Tensor, factor: torch.Tensor, valid: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`rows` times a factor each, rounded once, to the dtype of `like`."""
    factor = torch.where(valid, factor, 0.0).unsqueeze(-1)
    return torch.mul(rows, factor, out=torch.empty_like(like))


def _all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))


attach_gradients.register_autograd(_attach_backward, setup_context=_attach_setup)


def check_outputs(outputs: Sequence[str]) -> None:
    """Raises ValueError for a name that is not one of `OUTPUTS`."""
    if isinstance(outputs, str):
        raise ValueError(f"`outputs` is the string {outputs!r}; give a tuple of names, such as ({outputs!r},).")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"`outputs` names {unknown}; the allowed names are {', '.join(map(repr, OUTPUTS))}.")


def check_retain_memory(retain_memory: int | None) -> None:
    """Raises ValueError for a negative budget."""
    if retain_memory is not None and retain_memory < 0:
        raise ValueError(f"`retain_memory` is {retain_memory}; it must be 0 bytes or more, or None.")


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
    logits_memory: int = 512 * 2**20,
    retain_memory: int | None = None,
) -> torch.Tensor | LogProbsOutput:
    """Log-probability of each target under ``softmax(transform(hidden @ weight.T + bias))``, one chunk at a time.

    The logits are transformed to ``softcap * tanh(x * logit_scale / softcap) / temperature`` (without `softcap`:
    ``x * logit_scale / temperature``). They are rounded to the dtype of `hidden`, as ``nn.Linear`` rounds them, and
    everything after that is fp32. Log-probabilities and entropies are differentiable, with any upstream gradient;
    double backward is an error.

    The backward is exact and takes the cheapest way: logits that were kept give it three matmuls in all, recomputed
    ones four. Where only `hidden` needs a gradient it takes two, the second in the forward; but a gradient of the
    entropy then recomputes the logits.

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the token's outputs NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give 0 and no gradient.
        temperature: Divides the logits after the soft-cap, more than 0.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        outputs: Names among "entropy", "top1", "mean_logit" and "sum_squared_probs".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. More than 8 chunks would take an fp32 sum of
            the weight gradients; where a bigger buffer is cheaper than that sum, the buffer exceeds this.
        retain_memory: Bytes of logits kept for the backward: 2 * N * V bytes in half precision keep all of them and
            are fastest, 0 keeps none. By default one chunk, whose memory the forward and the backward need anyway.

    Returns:
        fp32 log-probabilities (float64 for float64 inputs) shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = RowOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs)
    check_linear(hidden, weight, target, bias, logits_memory)
    check_retain_memory(retain_memory)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    grad_enabled = torch.is_grad_enabled()
    needs = [grad_enabled and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    frozen_head = needs == [True, False, False]
    keep = kept_rows(flat, weight, logits_memory, retain_memory) if any(needs) and not frozen_head else 0
    asked = ("entropy" in outputs, "top1" in outputs, "mean_logit" in outputs, "sum_squared_probs" in outputs)
    with torch.no_grad():
        nll, lse, entropy, predicted, mean_logit, squares, kept, unit_gradient = _rows(
            flat, weight, labels, bias, *options, logits_memory, keep, *asked, frozen_head
        )
    if any(needs):
        nll, entropy = attach_gradients(
            nll, unit_gradient, flat, weight, labels, bias, nll, lse, entropy, kept, *options, logits_memory,
            0, weight.shape[0], "",
        )  # fmt: skip
    return log_probs_with_outputs(
        nll, entropy, predicted, mean_logit, squares, labels, ignore_index, outputs, target.shape
    )


def log_probs_with_outputs(
    nll: torch.Tensor,
    entropy: torch.Tensor,
    predicted: torch.Tensor,
    mean_logit: torch.Tensor,
    squares: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    outputs: Sequence[str],
    shape: torch.Size,
) -> torch.Tensor | LogProbsOutput:
    """The log-probabilities alone, or with the asked `outputs`, all of `shape`."""
    log_probs = (0.0 - nll).view(shape)
    if not outputs:
        return log_probs
    result = LogProbsOutput(log_probs)
    if "entropy" in outputs:
        result.entropy = entropy.view(shape)
    if "top1" in outputs:
        result.top1 = ((predicted == labels) & (labels != ignore_index)).view(shape)
    if "mean_logit" in outputs:
        result.mean_logit = mean_logit.view(shape)
    if "sum_squared_probs" in outputs:
        result.sum_squared_probs = squares.view(shape)
    return result


def linear_log_probs_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> torch.Tensor | LogProbsOutput:
    """`linear_log_probs` in plain torch: all logits at once, differentiated by autograd as often as wanted."""
    options = RowOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    z = transformed_logits(logits.to(compute_dtype(logits)), options)
    all_log_probs = z.log_softmax(-1)
    valid = target != ignore_index
    label = torch.where(valid, target, 0).long().unsqueeze(-1)
    log_probs = torch.where(valid, all_log_probs.gather(-1, label).squeeze(-1), 0.0)
    if not outputs:
        return log_probs
    # p * log p is 0 where p is, but its derivative would be NaN there.
    entropy = -(all_log_probs.exp() * all_log_probs.clamp(min=torch.finfo(z.dtype).min)).sum(-1)
    values = {
        "entropy": entropy,
        "top1": z.argmax(-1) == label.squeeze(-1),
        "mean_logit": z.detach().mean(-1),
        "sum_squared_probs": (2.0 * all_log_probs.detach()).logsumexp(-1),
    }
    asked = {name: values[name] for name in outputs}
    return LogProbsOutput(log_probs, **{name: value.masked_fill(~valid, 0) for name, value in asked.items()})
