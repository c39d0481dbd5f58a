"""LM head + cross entropy: mean over the tokens."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.heads import head_cases, head_logits, in_parts
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, operation, provider, reference


@operation("linear_cross_entropy", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return head_cases(data, model, tokens)


@provider("linear_cross_entropy", "torch")
def eager(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    return F.cross_entropy(head_logits(hidden, weight, softcap), target)


@reference("linear_cross_entropy")
def exact(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    def losses(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head_logits(hidden, weight, softcap), target, reduction="none")

    return in_parts(losses, hidden, target).mean()


@provider("linear_cross_entropy", "liger-kernel", chunk_mem_const=16)
@provider("linear_cross_entropy", "liger-kernel", chunk_mem_const=8)
@provider("linear_cross_entropy", "liger-kernel")
def liger(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, chunk_mem_const: int = 1) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, target, softcap=softcap, chunk_mem_const=chunk_mem_const)


@provider("linear_cross_entropy", "trl")
def trl(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    arguments = (hidden, weight, None, target, 1.0, 32768, softcap, 1.0, ("log_probs",))
    return -ChunkedLogProbFunction.apply(*arguments)[0].mean()


@provider("linear_cross_entropy", "cut-cross-entropy")
def cut(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, target, softcap=softcap)


@provider("linear_cross_entropy", "quack")
def quack(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    if softcap is not None:
        raise ValueError("has no soft-cap")
    return chunked_linear_cross_entropy(hidden, weight, target)


@provider("linear_cross_entropy", "liger_trainer", logits_memory="2GiB")
@provider("linear_cross_entropy", "liger_trainer", logits_memory="1GiB")
@provider("linear_cross_entropy", "liger_trainer", logits_memory="128MiB")
@provider("linear_cross_entropy", "liger_trainer", logits_memory="64MiB")
@provider("linear_cross_entropy", "liger_trainer", logits_memory="62MiB")
@provider("linear_cross_entropy", "liger_trainer")
def ours(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    softcap: float | None,
    logits_memory: str = "512MiB",
) -> Tensor:
    from liger_trainer.configs.kernel_config import parse_bytes
    from liger_trainer.functional import linear_cross_entropy

    loss = linear_cross_entropy(hidden, weight, target, softcap=softcap, logits_memory=parse_bytes(logits_memory))
    assert isinstance(loss, Tensor)  # no outputs were asked for
    return loss
