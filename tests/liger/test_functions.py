"""Values and gradients of what has Liger's names, against plain torch in float64."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.liger import functional
from liger_trainer.liger.autograd_functions import LOSSES, OPERATIONS
from liger_trainer.liger.helpers import (
    LigerForCausalLMLoss,
    apply_tiled_mlp,
    fused_selective_log_softmax,
    unpack_cross_entropy_result,
)
from liger_trainer.liger.nn.distillation import LigerFusedLinearDistillationBase
from liger_trainer.liger.spelling import spelled

TOKENS, HIDDEN, VOCAB, EPS = 6, 8, 10, 1e-5
LABELS = torch.tensor([1, 3, -100, 0, 9, -100])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


X, Y, HEAD, OTHER_HEAD = (
    draw(TOKENS, HIDDEN),
    draw(TOKENS, HIDDEN, seed=1),
    draw(VOCAB, HIDDEN),
    draw(VOCAB, HIDDEN, seed=2),
)
LOGITS, TEACHER = draw(TOKENS, VOCAB), draw(TOKENS, VOCAB, seed=3)
WEIGHT, BIAS, CLASSES = draw(HIDDEN), draw(HIDDEN, seed=4), draw(VOCAB).abs()
Q, K, COS_SIN = draw(2, 3, TOKENS, HIDDEN), draw(2, 1, TOKENS, HIDDEN, seed=5), draw(1, TOKENS, HIDDEN // 2)
COS, SIN = COS_SIN.cos().repeat(1, 1, 2), COS_SIN.sin().repeat(1, 1, 2)
VALID = LABELS != -100


def normed(x, weight, eps=EPS):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def multimodal(x, cos, sin, sections):
    pick = torch.tensor([axis for _ in range(2) for axis, count in enumerate(sections) for _ in range(count)])
    columns = torch.arange(x.shape[-1])
    return rotated(x, cos[pick, ..., columns].permute(1, 2, 0), sin[pick, ..., columns].permute(1, 2, 0))


def divergence(student, teacher, beta):
    """The generalised Jensen-Shannon divergence of rows of log-probabilities: beta of the teacher."""
    mean = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    parts = (teacher.exp() * (teacher - mean)).sum(-1), (student.exp() * (student - mean)).sum(-1)
    return beta * parts[0] + (1 - beta) * parts[1]


def jsd(student, teacher, beta=0.3):
    return divergence(student, teacher, beta)[VALID].sum() / VALID.sum()


def kl(logits, p):
    return (p * (p.log() - logits.log_softmax(-1))).sum(-1)[VALID].sum() / VALID.sum()


def poly(x, weight, bias):
    return sum(weight[i] * normed(x ** (3 - i), 1.0) for i in range(3)) + bias


def near(q, k, v, size, dilation):
    out = torch.empty_like(q)
    for i in range(q.shape[-2]):
        at = [i + dilation * j for j in range(-(size // 2), size // 2 + 1) if 0 <= i + dilation * j < q.shape[-2]]
        scores = (k[..., at, :] * q[..., i : i + 1, :]).sum(-1) / math.sqrt(q.shape[-1])
        out[..., i, :] = (scores.softmax(-1).unsqueeze(-1) * v[..., at, :]).sum(-2)
    return out


def depth(v, query, weight):
    alpha = torch.einsum("d,nbd->nb", query, normed(v, weight)).softmax(0)
    return torch.einsum("nb,nbd->bd", alpha, v)


def moe(x, gate_up, down, index, weights):
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(index[token], weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] = out[token] + weight * (down[expert] @ (F.silu(gate) * up))
    return out


def sparsemax(x):
    ordered = x.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    count = (1 + torch.arange(1, x.shape[-1] + 1) * ordered > sums).sum(-1, keepdim=True)
    return (x - (sums.gather(-1, count - 1) - 1) / count).clamp(min=0)


def smoothed(logits, smoothing=0.1, z=1e-2):
    loss = F.cross_entropy(logits, LABELS, label_smoothing=smoothing)
    return loss + z * logits.logsumexp(-1).square()[VALID].mean()


def multi_token(scores, weight, bias):
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    probabilities = scores.masked_fill(~causal, -1e9).softmax(-1)
    return F.conv2d(probabilities, weight, bias, padding=1).masked_fill(~causal, 0.0)


PROBABILITIES = TEACHER.softmax(-1)
LOG, TEACHER_LOG = LOGITS.log_softmax(-1), TEACHER.log_softmax(-1)
TOP = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0], [2, 1]])
COMPLEX = torch.polar(torch.ones(1, TOKENS, HIDDEN // 2, dtype=torch.float64), COS_SIN)
MULTI = draw(3, 1, TOKENS, HIDDEN // 2)
MULTI_COS, MULTI_SIN = MULTI.cos().repeat(1, 1, 1, 2), MULTI.sin().repeat(1, 1, 1, 2)


def as_complex(x):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * COMPLEX.unsqueeze(2)).flatten(-2)


# Name -> (arguments of `apply`, in plain torch, where float arguments are those that get gradients).
CASES: dict[str, tuple[tuple, Callable]] = {
    "LigerAttnResFunction": ((draw(4, TOKENS, HIDDEN), WEIGHT, BIAS, EPS), lambda v, q, w, e: depth(v, q, w)),
    "LigerCrossEntropyFunction": (
        (LOGITS, LABELS, None, -100, 1e-2, 0.1),
        lambda x, *_: (smoothed(x), None, None, None),
    ),
    "LigerDyTFunction": ((X, draw(1), WEIGHT, BIAS), lambda x, a, g, b: g * torch.tanh(a * x) + b),
    "LigerEmbeddingFunction": ((HEAD, torch.tensor([[1, 2], [2, 0]])), lambda w, i: w[i]),
    "LigerFusedAddRMSNormFunction": ((X, Y, WEIGHT, EPS), lambda x, r, w, e: (normed(x + r, w), x + r)),
    "LigerFusedCETVDFunction": (
        (LOGITS, TEACHER, LABELS),
        lambda s, t, y: (
            F.cross_entropy(s, y, reduction="none"),
            (s.softmax(-1) - t.detach().softmax(-1)).abs().sum(-1).mul(VALID) / 2,
        ),
    ),
    "LigerFusedGateUpSiLUMulFunction": ((X,), lambda y: F.silu(y[:, :4]) * y[:, 4:]),
    "LigerFusedLinearCrossEntropyFunction": (
        (X, HEAD, LABELS, CLASSES, None, -100, 1e-2, 0.1, "mean", None, False, torch.float32),
        lambda x, w, y, b, *_: (smoothed(x @ w.t() + b), None),
    ),
    "LigerFusedLinearJSDFunction": (
        (X, HEAD, Y, OTHER_HEAD, LABELS, 0.3, -100, 2.0, None, None, None),
        lambda x, w, t, v, *_: jsd((x @ w.t() / 2).log_softmax(-1), (t @ v.t() / 2).log_softmax(-1).detach()),
    ),
    "LigerFusedLinearKLDivFunction": (
        (X, HEAD, PROBABILITIES, LABELS, "batchmean", -100, 2.0),
        lambda x, w, p, *_: kl(x @ w.t() / 2, p.detach()),
    ),
    "LigerFusedLinearScaledCrossEntropyFunction": (
        (X, HEAD, LABELS, 2.0),
        lambda x, w, y, t: F.cross_entropy(x @ w.t() / t, y, reduction="none"),
    ),
    "LigerFusedMoEFunction": ((X, draw(3, 10, HIDDEN), draw(3, HIDDEN, 5), TOP, draw(TOKENS, 2)), moe),
    "LigerFusedNeighborhoodAttentionFunction": ((Q, Q + 1, Q * Q, 3, 2), near),
    "LigerGELUMulFunction": ((X, Y), lambda a, b: F.gelu(a, approximate="tanh") * b),
    "LigerGroupNormFunction": (
        (draw(2, HIDDEN, 5), WEIGHT, BIAS, HIDDEN, 2, EPS),
        lambda x, w, b, c, g, e: F.group_norm(x, g, w, b, e),
    ),
    "LigerJSDFunction": ((LOG, TEACHER_LOG, LABELS, 0.3), lambda s, t, *_: jsd(s, t.detach())),
    "LigerKLDivLossFunction": (
        (LOG, PROBABILITIES, "sum"),
        lambda s, p, r: F.kl_div(s, p.detach(), reduction=r),
    ),
    "LigerLayerNormFunction": ((X, WEIGHT, BIAS, EPS), lambda x, w, b, e: F.layer_norm(x, (HIDDEN,), w, b, e)),
    "LigerLlama4RopeFunction": (
        (Q.transpose(1, 2), K.transpose(1, 2), COMPLEX.to(torch.complex64)),
        lambda q, k, f: (as_complex(q), as_complex(k)),
    ),
    "LigerMLPFunction": (
        (X, draw(5, HIDDEN), draw(5, HIDDEN, seed=6), draw(HIDDEN, 5), 0.5, 3.0),
        lambda x, g, u, d, a, b: (F.silu(x @ g.t() * a) * (x @ u.t())) @ d.t() * b,
    ),
    "LigerModulatedRMSNormFunction": (
        (X, WEIGHT, Y, X + Y, EPS),
        lambda x, w, s, b, e: normed(x, w) * (1 + s) + b,
    ),
    "LigerMultiTokenAttentionFunction": (
        (draw(2, 3, 5, 5), draw(4, 3, 3, 3), draw(4), 1, 1),
        lambda s, w, b, *_: multi_token(s, w, b),
    ),
    "LigerPolyNormFunction": ((X, draw(3), draw(1), EPS), lambda x, w, b, e: poly(x, w, b)),
    "LigerQwen2VLMRopeFunction": (
        (Q, K, MULTI_COS, MULTI_SIN, [1, 1, 2]),
        lambda q, k, c, s, m: (multimodal(q, c, s, m), multimodal(k, c, s, m)),
    ),
    "LigerReLUSquaredFunction": ((X,), lambda x: F.relu(x).square()),
    "LigerRMSNormFunction": ((X, WEIGHT, EPS, 1.0, "gemma", False), lambda x, w, *_: normed(x, 1 + w)),
    "LigerRopeFunction": (
        (Q, K, COS, SIN, None, 1, HIDDEN),
        lambda q, k, c, s, *_: (rotated(q, c, s), rotated(k, c, s)),
    ),
    "LigerSiLUMulFunction": ((X, Y, 0.5, 3.0), lambda a, b, g, d: F.silu(a * g) * b * d),
    "LigerSoftmaxFunction": ((X,), lambda x: x.softmax(-1)),
    "LigerSparsemaxFunction": ((X, -1), lambda x, d: sparsemax(x)),
    "LigerTVDLossFunction": (
        (LOGITS.softmax(-1), PROBABILITIES, LABELS),
        lambda p, q, *_: (p - q.detach()).abs().sum(-1)[VALID].sum() / 2 / VALID.sum(),
    ),
    "LigerTiledMLPFunction": (
        (lambda module, x: module(x), torch.nn.Linear(HIDDEN, HIDDEN).double(), X, 3),
        lambda f, m, x, n: m(x),
    ),
    "LigerVocabParallelCEFunction": (
        (draw(TOKENS, 1, VOCAB), LABELS[:, None], None, -100, 0.1, "pytorch", "global"),
        lambda x, y, *_: F.cross_entropy(x[:, 0], y[:, 0], reduction="none", label_smoothing=0.1)[:, None],
    ),
}


def leaves(arguments):
    """Copies in which every float tensor gets a gradient."""

    def copy(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().clone().requires_grad_()
        return value

    return tuple(copy(value) for value in arguments)


def tensors(result):
    values = result if isinstance(result, tuple) else (result,)
    return [value for value in values if value is not None]


def gradients(arguments, results):
    """Those of a sum of the results, weighted so that every entry counts in another way."""
    inputs = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    total = sum(
        (value.double() * torch.cos(torch.arange(value.numel())).reshape(value.shape)).sum() for value in results
    )
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if value is None else value for x, value in zip(inputs, found, strict=True)]


def agree(ours, plain, arguments):
    mine, theirs = leaves(arguments), leaves(arguments)
    found, expected = tensors(ours(*mine)), tensors(plain(*theirs))
    assert len(found) == len(expected)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), other.double(), rtol=1e-5, atol=1e-6)
    for value, other in zip(gradients(mine, found), gradients(theirs, expected), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_operations(name):
    arguments, plain = CASES[name]
    agree(OPERATIONS[name].apply, plain, arguments)


def test_every_operation_has_a_case():
    elsewhere = {
        "LigerMHCCoeffsFunction",
        "LigerMHCPreFunction",
        "LigerMHCPostResFunction",
    }  # in test_hyper_connections
    elsewhere |= {"LigerFusedLinearScaledCrossEntropyTPFunction"}  # in test_helpers.py
    assert OPERATIONS.keys() == CASES.keys() | elsewhere


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        ("liger_attn_res", "LigerAttnResFunction"),
        ("liger_dyt", "LigerDyTFunction"),
        ("liger_fused_linear_kl_div", "LigerFusedLinearKLDivFunction"),
        ("liger_fused_neighborhood_attention", "LigerFusedNeighborhoodAttentionFunction"),
        ("liger_geglu", "LigerGELUMulFunction"),
        ("liger_group_norm", "LigerGroupNormFunction"),
        ("liger_layer_norm", "LigerLayerNormFunction"),
        ("liger_multi_token_attention", "LigerMultiTokenAttentionFunction"),
        ("liger_poly_norm", "LigerPolyNormFunction"),
        ("liger_qwen2vl_mrope", "LigerQwen2VLMRopeFunction"),
        ("liger_relu_squared", "LigerReLUSquaredFunction"),
        ("liger_rope", "LigerRopeFunction"),
        ("liger_softmax", "LigerSoftmaxFunction"),
        ("liger_sparsemax", "LigerSparsemaxFunction"),
        ("liger_fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
        ("liger_modulated_rms_norm", "LigerModulatedRMSNormFunction"),
        ("liger_rms_norm", "LigerRMSNormFunction"),
    ],
)
def test_functions_of_the_same_arguments(function, operation):
    arguments, plain = CASES[operation]
    agree(getattr(functional, function), plain, arguments)


def test_functions_of_other_arguments():
    agree(functional.liger_swiglu, lambda a, b: F.silu(a) * b, (X, Y))
    jsd_arguments, plain = CASES["LigerJSDFunction"]
    agree(functional.liger_jsd, plain, jsd_arguments)
    arguments, plain = CASES["LigerFusedLinearJSDFunction"]
    agree(functional.liger_fused_linear_jsd, plain, arguments[:8])
    agree(
        lambda s, p: functional.liger_kl_div(s, p, True, True, "batchmean"),
        lambda s, p: F.kl_div(s, p.detach(), reduction="batchmean"),
        (LOG, PROBABILITIES),
    )
    agree(functional.liger_tvd, lambda p, q: (p - q.detach()).abs().mean() / 2, (LOGITS.softmax(-1), PROBABILITIES))
    agree(
        lambda v: functional.liger_attn_res([v[0], v[1]], WEIGHT, BIAS, EPS),
        lambda v: depth(v, WEIGHT, BIAS),
        (draw(2, TOKENS, HIDDEN),),
    )


def test_cross_entropy_and_its_outputs():
    agree(
        lambda x: functional.liger_cross_entropy(x, LABELS, label_smoothing=0.1, lse_square_scale=1e-2),
        smoothed,
        (LOGITS,),
    )
    result = functional.liger_cross_entropy(LOGITS, LABELS, return_z_loss=True, lse_square_scale=1.0)
    torch.testing.assert_close(result.z_loss.double(), LOGITS.logsumexp(-1).square()[VALID].mean())
    predicted = functional.liger_cross_entropy(LOGITS, LABELS, return_predicted_tokens=True).predicted_tokens
    assert predicted.tolist() == torch.where(VALID, LOGITS.argmax(-1), -1).tolist()


def test_linear_cross_entropy_and_its_outputs():
    agree(
        lambda x, w, b: functional.liger_fused_linear_cross_entropy(
            x, w, LABELS, b, label_smoothing=0.1, lse_square_scale=1e-2, chunk_mem_const=2
        ),
        lambda x, w, b: smoothed(x @ w.t() + b),
        (X, HEAD, CLASSES),
    )
    arguments = (X, HEAD, LABELS, None, None, -100, 1.0, 0.0, "sum", None, True, None, False, True, True)
    loss, z_loss, accuracy, predicted = OPERATIONS["LigerFusedLinearCrossEntropyFunction"].apply(*arguments)
    logits = X @ HEAD.t()
    squares = logits.logsumexp(-1).square()[VALID].sum()
    torch.testing.assert_close(z_loss.double(), squares)
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits, LABELS, reduction="sum") + squares)
    assert predicted.tolist() == torch.where(VALID, logits.argmax(-1), -1).tolist()
    assert accuracy == (predicted == LABELS)[VALID].double().mean()


def test_log_likelihoods_with_their_entropy():
    apply = OPERATIONS["LigerFusedLinearScaledCrossEntropyFunction"].apply
    logits = X @ HEAD.t()
    agree(
        lambda x: apply(x, HEAD, LABELS, 1.0, -100, 1, True),
        lambda x: (
            F.cross_entropy(x @ HEAD.t(), LABELS, reduction="none"),
            torch.distributions.Categorical(logits=x @ HEAD.t()).entropy() * VALID,
        ),
        (X,),
    )
    assert logits.shape == (TOKENS, VOCAB)
    with pytest.raises(ValueError, match="`selected_token_ids` is given"):
        apply(X, HEAD, LABELS, selected_token_ids=torch.tensor([1]))


@pytest.mark.parametrize("items", [None, 3])
@pytest.mark.parametrize("shifted", [False, True])
def test_causal_lm_loss(items, shifted):
    hidden, labels = draw(2, TOKENS, HIDDEN), torch.stack((LABELS, LABELS.flip(0)))
    given = {"shift_labels": labels} if shifted else {"labels": labels}

    def ours(x, w):
        arguments = {"labels": None, "hidden_size": HIDDEN, "num_items_in_batch": items, "dropped": 1} | given
        return LigerForCausalLMLoss(x, w, final_logit_softcapping=2.0, **arguments)

    def plain(x, w):
        logits = 2 * torch.tanh(x @ w.t() / 2)
        logits, target = (logits, labels) if shifted else (logits[:, :-1], labels[:, 1:])
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return total / (items or (target != -100).sum())

    agree(ours, plain, (hidden, HEAD))


def test_causal_lm_loss_with_what_it_counts():
    result = LigerForCausalLMLoss(X[None], HEAD, LABELS[None], HIDDEN, return_token_accuracy=True)
    loss, z_loss, accuracy, predicted = unpack_cross_entropy_result(result)
    assert (z_loss, predicted) == (None, None)
    assert accuracy == ((X @ HEAD.t()).argmax(-1)[:-1] == LABELS[1:])[LABELS[1:] != -100].double().mean()
    assert unpack_cross_entropy_result((loss, accuracy)) == (loss, accuracy, None, None)
    assert unpack_cross_entropy_result(loss) == (loss, None, None, None)
    with pytest.raises(ValueError, match="`labels` and `shift_labels` are both None"):
        LigerForCausalLMLoss(X[None], HEAD, None, HIDDEN)


def test_losses_over_a_head():
    from liger_trainer.losses import LigerFusedLinearDPOLoss

    target = torch.randint(0, VOCAB, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    hidden, reference = draw(4, TOKENS, HIDDEN), draw(4, TOKENS, HIDDEN, seed=7)

    def options(function):
        return lambda x, w: function(x, w)[0]

    agree(
        options(
            lambda x, w: LOSSES["LigerFusedLinearDPOFunction"].apply(
                x, w, target, None, reference, HEAD, None, -100, 0.5
            )
        ),
        options(lambda x, w: LigerFusedLinearDPOLoss(beta=0.5)(w, x, target, None, reference, HEAD)),
        (hidden, HEAD),
    )


class ForwardKL(LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=0.0, scale=1.0):
        losses = F.kl_div(student_logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="none").sum(-1)
        return scale * (beta + losses)[target != ignore_index].sum()

    @classmethod
    def forward(cls, ctx, student, weight, teacher, teacher_weight, target, bias, options):
        return super().forward(
            cls=cls,
            ctx=ctx,
            student_input=student,
            student_weight=weight,
            teacher_input=teacher,
            teacher_weight=teacher_weight,
            target=target,
            student_bias=bias,
            chunk_size=4,
            **options,
        )

    @staticmethod
    def backward(ctx, *grads):
        return (*LigerFusedLinearDistillationBase.backward(ctx, *grads)[:6], None)


@pytest.mark.parametrize("bias", [CLASSES, None], ids=["bias", "no bias"])
def test_a_distillation_loss_of_ones_own(bias):
    options = {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7, "temperature": 2.0, "beta": 0.1, "scale": 3.0}

    def plain(x, w, t, v, y, b, _):
        logits, teacher = F.linear(x, w, b), (t @ v.t()).detach()
        soft = F.kl_div((logits / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none").sum(-1) + 0.1
        return 0.3 * F.cross_entropy(logits, y) + 0.7 * 3.0 * soft[VALID].mean()

    agree(ForwardKL.apply, plain, (X, HEAD, Y, OTHER_HEAD, LABELS, bias, options))
    total, soft, hard = ForwardKL.apply(
        X, HEAD, Y, OTHER_HEAD, LABELS, bias, {**options, "return_soft_hard_loss": True}
    )
    torch.testing.assert_close(total, 0.3 * hard + 0.7 * soft)
    with pytest.raises(NotImplementedError, match="distillation_loss_fn"):
        LigerFusedLinearDistillationBase.distillation_loss_fn(X, Y)
    with pytest.raises(ValueError, match="`student_weight` has 10 rows and `teacher_weight` 9"):
        ForwardKL.apply(X, HEAD, Y, OTHER_HEAD[:9], LABELS, bias, options)


def test_log_probabilities_of_a_completion():
    logits = draw(2, 4, VOCAB)
    ids, mask = torch.tensor([[7, 1, 2, 3], [7, 4, 5, 6]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    expected = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    found = fused_selective_log_softmax(logits.requires_grad_(), ids)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
    masked = fused_selective_log_softmax(logits, ids, mask=mask)
    assert masked[0, 2] == 0
    assert torch.equal(masked[1], found[1])


def test_tiles():
    linear = torch.nn.Linear(HIDDEN, HIDDEN).double()
    agree(
        lambda x: apply_tiled_mlp(lambda module, part: module(part), linear, x), linear, (draw(2 * HIDDEN + 1, HIDDEN),)
    )


def test_neighbours_are_checked():
    for size, dilation, name in ((4, 1, "kernel_size"), (-1, 1, "kernel_size"), (3, 0, "dilation")):
        with pytest.raises(ValueError, match=f"`{name}` is"):
            functional.liger_fused_neighborhood_attention(Q, Q, Q, size, dilation)


def test_rows_are_functions_of_their_module():
    assert pickle.loads(pickle.dumps(functional.liger_swiglu)) is functional.liger_swiglu
    with pytest.raises(TypeError, match=r"liger_swiglu\(\) missing 1 required positional argument: 'b'"):
        functional.liger_swiglu(X)
    with pytest.raises(TypeError, match=r"softmax takes none of \['dim'\] of liger_softmax"):
        spelled("liger_softmax(x, dim=-1)", functional.liger_softmax)


def test_rows_compile():
    compiled = torch.compile(lambda a, b: functional.liger_swiglu(a, b), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, Y), F.silu(X) * Y)
