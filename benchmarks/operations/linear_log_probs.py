"""LM head + log-probabilities: one per token, each with its own gradient."""

from collections.abc import Iterator

from torch import Tensor

from liger_trainer.benchmarks.heads import head_cases, head_logits, in_parts
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, operation, provider, reference


@operation("linear_log_probs", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return head_cases(data, model, tokens, upstream=True)


@provider("linear_log_probs", "torch")
def eager(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    logits = head_logits(hidden, weight, softcap)
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


@reference("linear_log_probs")
def exact(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    def some(hidden: Tensor, target: Tensor) -> Tensor:
        return eager(hidden, weight, target, softcap)

    return in_parts(some, hidden, target)


@provider("linear_log_probs", "liger-kernel")
def liger(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    if softcap is not None:
        raise ValueError("has no soft-cap")
    output = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, target, 1.0, -100)
    return -(output[0] if isinstance(output, tuple) else output)


@provider("linear_log_probs", "trl")
def trl(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 32768, softcap, 1.0, ("log_probs",))[0]


@provider("linear_log_probs", "liger_trainer", logits_memory="3GiB")
@provider("linear_log_probs", "liger_trainer", logits_memory="1GiB")
@provider("linear_log_probs", "liger_trainer")
def ours(
    hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, logits_memory: str = "512MiB"
) -> Tensor:
    from liger_trainer.configs.kernel_config import parse_bytes
    from liger_trainer.functional import linear_log_probs

    log_probs = linear_log_probs(hidden, weight, target, softcap=softcap, logits_memory=parse_bytes(logits_memory))
    assert isinstance(log_probs, Tensor)  # no outputs were asked for
    return log_probs
