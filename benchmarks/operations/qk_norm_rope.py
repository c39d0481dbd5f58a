"""QK-norm + RoPE: RMSNorm of queries and keys, then their rotary embedding (Qwen3, Gemma3)."""

from collections.abc import Iterator

from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.rms_norm import eager as eager_norm
from liger_trainer.benchmarks.operations.rope import rotary_tables, rotated
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


@operation("qk_norm_rope")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Projections shaped (batch, length, heads, width), as in models; results have the heads before the length."""
    length = min(tokens, 4096)
    q, k, dq, dk = (
        data.upstream(tokens // length, length, heads, model.head_dim) for heads in (model.heads, model.kv_heads) * 2
    )
    cos, sin = rotary_tables(data, length, model.head_dim)
    weights = {name: data.normal(model.head_dim) for name in ("q_weight", "k_weight")}
    size = q.numel() + k.numel()
    yield Case(
        {"q": q.requires_grad_(), "k": k.requires_grad_(), **weights, "cos": cos, "sin": sin, "eps": 1e-6},
        f"{tokens // length}×{length}, {model.heads}+{model.kv_heads} heads of {model.head_dim}",
        Floor(2 * size, 3 * size),
        (dq.transpose(1, 2), dk.transpose(1, 2)),
    )


Pair = tuple[Tensor, Tensor]


@provider("qk_norm_rope", "torch")
def eager(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    q, k = eager_norm(q, q_weight, eps).transpose(1, 2), eager_norm(k, k_weight, eps).transpose(1, 2)
    return rotated(q, cos, sin), rotated(k, cos, sin)


@provider("qk_norm_rope", "liger-kernel")
def liger(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    from liger_kernel.transformers.functional import liger_rms_norm, liger_rope

    q, k = liger_rms_norm(q, q_weight, eps), liger_rms_norm(k, k_weight, eps)
    return liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


@provider("qk_norm_rope", "liger_trainer", kernels=3)
def apart(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, kernels: int
) -> Pair:
    from liger_trainer.functional import rms_norm, rope

    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


@provider("qk_norm_rope", "liger_trainer")
def ours(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    from liger_trainer.functional import qk_norm_rope

    return qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos, sin, eps, unsqueeze_dim=1)
