"""Embedding, and the LM head with what follows it: cross entropy, log-probabilities, divergences from a teacher's."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.logits import jensen_shannon
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, reference, wide


@operation("embedding", "Embedding: of tokens, with the gradient of the whole table")
def embedding_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Random tokens of the whole vocabulary; the gradient of every row is written."""
    size, table = tokens * model.hidden, model.vocab * model.hidden
    arguments = {"weight": data.normal(model.vocab, model.hidden), "tokens": data.integers(model.vocab, tokens)}
    floor, upstream = Floor(2 * size, size + table), (data.upstream(tokens, model.hidden),)
    yield Case(arguments, f"{tokens} of {model.vocab}×{model.hidden}", floor, upstream)


provider("embedding", "torch")(lambda weight, tokens: F.embedding(tokens, weight))
library("embedding", "liger-kernel", path="liger_kernel.ops.experimental.embedding:LigerEmbeddingFunction.apply")
library("embedding", "liger_trainer", by_name=["weight"])


def matmuls(*heads: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """The matmuls of heads, given as (hidden, weight): the logits, and the gradients that are required."""

    def run() -> None:
        for hidden, weight in heads:
            inputs, matrix = hidden.detach(), weight.detach()
            logits = inputs @ matrix.T
            if hidden.requires_grad:
                torch.mm(logits, matrix)
            if weight.requires_grad:
                torch.mm(logits.T, inputs)

    return run


def head_weight(data: Data, model: Model, grad: bool = True) -> Tensor:
    """A head whose logits have a standard deviation of 3, so that probabilities are far from uniform."""
    return data.normal(model.vocab, model.hidden, scale=3 * model.hidden**-0.5, grad=grad)


def trained_and_frozen(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The variants of a case, each with its head."""
    for variant in ("", "frozen"):
        yield variant, weight.detach().requires_grad_(variant != "frozen")


def head_cases(data: Data, model: Model, tokens: int, upstream: bool = False) -> Iterator[Case]:
    """The head trained, and frozen; with `upstream`, the result is one number per token with its own gradient."""
    hidden, matrix = data.normal(tokens, model.hidden), head_weight(data, model)
    target = data.integers(model.vocab, tokens)
    gradients = (data.upstream(tokens, dtype=torch.float32),) if upstream else ()
    shape = f"N={tokens} H={model.hidden} V={model.vocab}"
    shape += "" if model.softcap is None else f" soft-cap {model.softcap:g}"
    for variant, weight in trained_and_frozen(matrix):
        arguments = {"hidden": hidden, "weight": weight, "target": target, "softcap": model.softcap}
        yield Case(arguments, shape, Floor(matmuls=matmuls((hidden, weight))), gradients, variant)


def head_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Logits as models compute them, in float32 (or wider) after the matmul."""
    return soft_capped(wide(hidden @ weight.T), softcap)


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def in_parts(function: Callable[..., Tensor], size: int = 1024, whole: Iterable[str] = (), **arguments: Any) -> Tensor:
    """Concatenated results of `function(**arguments)`, with the logits of only `size` rows at a time.

    The arguments that are not `whole` are split.
    """
    rows = {name: value.split(size) for name, value in arguments.items() if name not in whole}
    shared = {name: value for name, value in arguments.items() if name in whole}
    parts = [
        checkpoint(function, use_reentrant=False, preserve_rng_state=False, **dict(zip(rows, part)), **shared)
        for part in zip(*rows.values())
    ]
    return torch.cat(parts)


operation("linear_cross_entropy", "LM head + cross entropy: mean over the tokens", tokens=8192)(head_cases)


@provider("linear_cross_entropy", "torch")
def eager_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    return F.cross_entropy(head_logits(hidden, weight, softcap), target)


liger_cross_entropy = partial(
    library,
    "linear_cross_entropy",
    "liger-kernel",
    path="liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
    by_name=["softcap"],
)
liger_cross_entropy(fixed={"chunk_mem_const": 1})
for chunk in (8, 16):
    liger_cross_entropy(chunk_mem_const=chunk)


@operation("linear_log_probs", "LM head + log-probabilities: one per token, each with its own gradient", tokens=8192)
def log_probs_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return head_cases(data, model, tokens, upstream=True)


@provider("linear_log_probs", "torch")
def eager_log_probs(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None = None) -> Tensor:
    logits = head_logits(hidden, weight, softcap)
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


@reference("linear_log_probs")
def exact_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None = None, size: int = 1024
) -> Tensor:
    arguments = {"hidden": hidden, "weight": weight, "target": target, "softcap": softcap}
    return in_parts(eager_log_probs, size, ("weight", "softcap"), **arguments)


@provider("linear_log_probs", "liger-kernel")
def liger_log_probs(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    if softcap is not None:
        raise ValueError("has no soft-cap")
    output = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, target, 1.0, -100)
    return -(output[0] if isinstance(output, tuple) else output)


@provider("linear_log_probs", "trl")
def trl_log_probs(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None = None) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    head = hidden.flatten(0, -2), weight, None, target.flatten()
    return ChunkedLogProbFunction.apply(*head, 1.0, 32768, softcap, 1.0, ("log_probs",))[0].view_as(target)


library("linear_log_probs", "liger_trainer", by_name=["softcap"])
for memory in ("1GiB", "3GiB"):
    library("linear_log_probs", "liger_trainer", by_name=["softcap"], logits_memory=memory)


def mean_loss_of(log_probs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cross entropy, from the log-probability of each token."""
    return lambda *heads, **options: -log_probs(*heads, **options).mean()


reference("linear_cross_entropy")(mean_loss_of(exact_log_probs))
provider("linear_cross_entropy", "trl")(mean_loss_of(trl_log_probs))
library(
    *("linear_cross_entropy", "cut-cross-entropy"), path="cut_cross_entropy:linear_cross_entropy", by_name=["softcap"]
)


@provider("linear_cross_entropy", "quack")
def quack_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    if softcap is not None:
        raise ValueError("has no soft-cap")
    return chunked_linear_cross_entropy(hidden, weight, target)


library("linear_cross_entropy", "liger_trainer", by_name=["softcap"])
for memory in ("62MiB", "64MiB", "128MiB", "1GiB", "2GiB"):
    library("linear_cross_entropy", "liger_trainer", by_name=["softcap"], logits_memory=memory)


def distillation_case(data: Data, model: Model, tokens: int, **others: float) -> Case:
    """A student and a teacher of one size. The floor: both logits, and the student's two gradients."""
    hiddens = [data.normal(tokens, model.hidden, grad=student) for student in (True, False)]
    student, teacher = zip(hiddens, [head_weight(data, model, grad=student) for student in (True, False)])
    arguments: dict[str, Any] = dict(zip(("student_hidden", "student_weight"), student))
    arguments |= dict(zip(("teacher_hidden", "teacher_weight"), teacher))
    floor = Floor(matmuls=matmuls(student, teacher))
    return Case(arguments | others, f"N={tokens} H={model.hidden} V={model.vocab}", floor)


Divergence = Callable[[Tensor, Tensor], Tensor]


def divergences(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, of: Divergence
) -> Tensor:
    """The divergence of each token, from both log-probabilities."""
    student = head_logits(student_hidden, student_weight).log_softmax(-1)
    with torch.no_grad():
        teacher = head_logits(teacher_hidden, teacher_weight).log_softmax(-1)
    return of(student, teacher)


exact_divergences = partial(in_parts, divergences, whole=("student_weight", "teacher_weight", "of"))
"""`divergences` with the logits of a part of the tokens at a time."""


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def mean_of(divergences: Callable[..., Tensor], formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mean divergence by a formula, which gets what is no head."""

    def run(**arguments: Any) -> Tensor:
        heads = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        return divergences(
            **heads, of=partial(formula, **{k: v for k, v in arguments.items() if k not in heads})
        ).mean()

    return run


def trl_divergence(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float = 0.0
) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    heads = student_hidden, student_weight, None, teacher_hidden, teacher_weight, None
    return ChunkedDivergenceFunction.apply(*heads, beta)[0].mean()


def liger_divergence(beta: float = 0.0, **heads: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    return liger_fused_linear_jsd(*heads.values(), jsd_beta=beta)


@operation(
    "linear_jsd", "LM heads + JSD: distillation of a teacher's head into a student's, mean over the tokens", tokens=8192
)
def jsd_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield distillation_case(data, model, tokens, beta=0.5)


@operation(
    "linear_kl",
    "LM heads + KL: forward divergence of a teacher's head from a student's, mean over the tokens",
    tokens=8192,
)
def kl_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield distillation_case(data, model, tokens)


for name, formula in (("linear_jsd", jensen_shannon), ("linear_kl", forward_kl)):
    provider(name, "torch")(mean_of(divergences, formula))
    reference(name)(mean_of(exact_divergences, formula))
    provider(name, "liger-kernel")(liger_divergence)
    provider(name, "trl")(trl_divergence)


library("linear_jsd", "liger_trainer", by_name=["beta"])
for memory in ("512MiB", "2GiB"):
    library("linear_jsd", "liger_trainer", by_name=["beta"], logits_memory=memory)
library("linear_kl", "liger_trainer")
