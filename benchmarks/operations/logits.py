"""Functions of given logits or probabilities: cross entropy, divergences, softmax and sparsemax."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, case_of_rows, library, operation, provider, wide


@operation("cross_entropy", "Cross entropy: on given logits, mean over the tokens", tokens=8192)
def cross_entropy_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The logits of the whole vocabulary, which the gradient reads a second time."""
    size = tokens * model.vocab
    yield Case(
        {"logits": data.normal(tokens, model.vocab, scale=3.0), "target": data.integers(model.vocab, tokens)},
        f"{tokens}×{model.vocab}",
        Floor(forward=size, backward=2 * size),
    )


provider("cross_entropy", "torch")(lambda logits, target: F.cross_entropy(wide(logits), target))
library("cross_entropy", "liger-kernel", "quack", "liger_trainer")
library("cross_entropy", "liger_trainer", expected_grad=1.0)  # not `inplace`: the logits are a leaf


def divergence_case(
    data: Data, model: Model, tokens: int, student: tuple[str, Callable], teacher: Callable, **others: float
) -> Case:
    """Two distributions, each read once, and the gradient of the student's, which is given with its name."""
    name, activation = student
    logits, teachers = (data.normal(tokens, model.vocab, scale=3.0, grad=False) for _ in range(2))
    arguments = {name: activation(logits, -1).requires_grad_(), "target": teacher(teachers, -1), **others}
    size = tokens * model.vocab
    return Case(arguments, f"{tokens}×{model.vocab}", Floor(2 * size, size))


@operation("jsd", "JSD: Jensen-Shannon divergence of given log-probabilities, mean over the tokens", tokens=8192)
def jsd_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield divergence_case(data, model, tokens, ("log_probs", torch.log_softmax), torch.log_softmax, beta=0.5)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence of each token, from log-probabilities."""
    mixture = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    terms = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
    return terms.sum(-1)


@provider("jsd", "torch")
def eager_jsd(log_probs: Tensor, target: Tensor, beta: float) -> Tensor:
    return jensen_shannon(wide(log_probs), wide(target), beta).mean()


library("jsd", "liger-kernel", "liger_trainer", by_name=["beta"])


@operation(
    "kl_div",
    "KL divergence: of given log-probabilities from target probabilities, summed and divided by the tokens",
    tokens=8192,
)
def kl_div_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield divergence_case(data, model, tokens, ("log_probs", torch.log_softmax), torch.softmax)


@provider("kl_div", "torch")
def eager_kl_div(log_probs: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(wide(log_probs), wide(target), reduction="batchmean")


library("kl_div", "liger-kernel", fixed={"reduction": "batchmean"})
library("kl_div", "liger_trainer")


@operation("tvd", "TVD: total variation distance of given probabilities, mean over the tokens", tokens=8192)
def tvd_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield divergence_case(data, model, tokens, ("probs", torch.softmax), torch.softmax)


@provider("tvd", "torch")
def eager_tvd(probs: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (wide(probs) - wide(target)).abs().sum(-1).mean()


library("tvd", "liger-kernel", fixed={"reduction": "batchmean"})
library("tvd", "liger_trainer")


@operation("sparsemax", "Sparsemax: over the last dimension", tokens=8192)
@operation("softmax", "Softmax: over the last dimension", tokens=8192)
def last_dimension_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield case_of_rows(data, (tokens, model.hidden))


provider("softmax", "torch")(lambda x: torch.softmax(x, -1))
library("softmax", "liger-kernel", "quack", "liger_trainer")


@provider("sparsemax", "torch")
def eager_sparsemax(x: Tensor) -> Tensor:
    ordered = wide(x).sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    size = (ordered * torch.arange(1, x.shape[-1] + 1, device=x.device) > excess).sum(-1, keepdim=True)
    threshold = excess.gather(-1, size - 1) / size
    return torch.relu(wide(x) - threshold).to(x.dtype)  # unlike clamp's, its gradient is 0 at the threshold


library("sparsemax", "liger-kernel", "liger_trainer")
