"""The losses of `liger_trainer.nn`: the options of their own, and that each passes its arguments to its function.

What the functions compute is proved in `tests/kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from liger_trainer import functional, nn
from liger_trainer.nn import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, LigerVocabParallelCrossEntropy

TOKENS, HIDDEN, VOCAB = 7, 12, 19


def head():
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True)
    target = torch.randint(VOCAB, (TOKENS,))
    target[[1, 4]] = -100
    return hidden, weight, bias, target


def gradients(loss, *tensors):
    return torch.autograd.grad(loss.sum(), tensors)


def both(options):
    """(loss of the logits, loss of the head) as functions of hidden, weight, target, bias."""
    named = dict(options)
    fused = LigerFusedLinearCrossEntropyLoss(ce_weight=named.pop("weight", None), **named)
    plain = LigerCrossEntropyLoss(**options)
    return {
        "logits": lambda hidden, weight, target, bias: plain(F.linear(hidden, weight, bias), target),
        "fused": lambda hidden, weight, target, bias: fused(weight, hidden, target, bias),
    }


@pytest.mark.parametrize("kind", ["logits", "fused"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_equal_torch(kind, reduction, weighted):
    options = {"reduction": reduction, "label_smoothing": 0.1, "weight": torch.rand(VOCAB) if weighted else None}
    hidden, weight, bias, target = head()
    loss = both(options)[kind](hidden, weight, target, bias)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), target, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, hidden, weight, bias), gradients(expected, hidden, weight, bias))


@pytest.mark.parametrize("kind", ["logits", "fused"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_softcap_z_loss_and_outputs(kind, reduction):
    options = {"reduction": reduction, "softcap": 5.0, "lse_square_scale": 0.01}
    hidden, weight, bias, target = head()
    flags = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    output = both(options | flags)[kind](hidden, weight, target, bias)
    logits = 5.0 * torch.tanh(F.linear(hidden, weight, bias) / 5.0)
    valid = target != -100
    z_loss = torch.where(valid, 0.01 * logits.logsumexp(-1) ** 2, 0)
    nll = F.cross_entropy(logits, target, reduction="none")
    right = (logits.argmax(-1) == target).float()
    if reduction != "none":
        divisor = valid.sum() if reduction == "mean" else 1
        z_loss, nll, right = z_loss.sum() / divisor, nll.sum() / divisor, right.sum() / valid.sum()
    assert isinstance(output, functional.CrossEntropyOutput)
    torch.testing.assert_close(output.z_loss, z_loss)
    torch.testing.assert_close(output.loss, nll + z_loss)
    torch.testing.assert_close(output.token_accuracy, right)
    assert torch.equal(output.predicted_tokens[valid], logits.argmax(-1)[valid])
    only = both(options | {"return_token_accuracy": True})[kind](hidden, weight, target, bias)
    assert only.z_loss is None
    assert only.predicted_tokens is None
    torch.testing.assert_close(only.token_accuracy, right)


@pytest.mark.parametrize("kind", ["logits", "fused"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_z_loss_beside_class_weights(kind, label_smoothing):
    """As Liger's: the cross entropy is divided by the sum of the weights, the z-loss, which has none, by the tokens."""
    class_weights = 3.0 * torch.rand(VOCAB)
    options = {"weight": class_weights, "lse_square_scale": 0.1, "label_smoothing": label_smoothing}
    hidden, weight, bias, target = head()
    output = both(options | {"return_z_loss": True})[kind](hidden, weight, target, bias)
    logits = F.linear(hidden, weight, bias)
    z_loss = 0.1 * logits.logsumexp(-1)[target != -100].square().mean()
    expected = z_loss + F.cross_entropy(logits, target, class_weights, label_smoothing=label_smoothing)
    torch.testing.assert_close(output.z_loss, z_loss)
    torch.testing.assert_close(output.loss, expected)
    ours = gradients(output.loss, hidden, weight, bias)
    torch.testing.assert_close(ours, gradients(expected, hidden, weight, bias))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_scaling(reduction, weighted):
    class_weights = torch.rand(VOCAB) if weighted else None
    loss_module = LigerFusedLinearCrossEntropyLoss(
        class_weights, reduction=reduction, lse_square_scale=0.01, use_token_scaling=True, return_z_loss=True
    )
    hidden, weight, bias, target = head()
    output = loss_module(weight, hidden, target, bias)
    logits = F.linear(hidden, weight, bias)
    valid = target != -100
    probability = logits.softmax(-1).gather(1, target.where(valid, 0)[:, None])[:, 0].detach()
    z_loss = torch.where(valid, 0.01 * logits.logsumexp(-1) ** 2, 0) * probability
    nll = F.cross_entropy(logits, target, weight=class_weights, reduction="none") * probability
    if reduction != "none":
        counted = valid.float() if class_weights is None else class_weights[target.where(valid, 0)] * valid
        divisors = (valid.sum(), counted.sum()) if reduction == "mean" else (1, 1)
        z_loss, nll = z_loss.sum() / divisors[0], nll.sum() / divisors[1]
    torch.testing.assert_close(output.loss, nll + z_loss)
    torch.testing.assert_close(output.z_loss, z_loss)
    ours = gradients(output.loss, hidden, weight, bias)
    torch.testing.assert_close(ours, gradients(nll + z_loss, hidden, weight, bias))


def test_token_scaling_with_nothing_to_learn():
    hidden, weight, _, target = head()
    target.fill_(-100)
    loss = LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)(weight, hidden, target)
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


def test_loss_is_float32_and_a_module():
    hidden, weight, _, target = head()
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)(weight.bfloat16(), hidden.bfloat16(), target)
    assert loss.dtype == torch.float32
    assert isinstance(LigerCrossEntropyLoss(), torch.nn.Module)
    assert not list(LigerCrossEntropyLoss(weight=torch.rand(VOCAB)).parameters())


@pytest.mark.parametrize("loss", [LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, r"`label_smoothing` is 1\.5"),
        ({"reduction": "avg"}, "`reduction` is 'avg'"),
        ({"softcap": 0}, "`softcap` is 0"),
    ],
)
def test_options_out_of_range(loss, options, message):
    with pytest.raises(ValueError, match=message):
        loss(**options)


IGNORE = -1


def two_heads(vocab=VOCAB):
    """Hidden states, weight and bias of a student and of a teacher, and labels of which a third is ignored."""
    student = [torch.randn(shape, requires_grad=True) for shape in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))]
    teacher = [torch.randn(shape) for shape in ((TOKENS, 5), (vocab, 5), (vocab,))]
    return student, teacher, torch.randint(0, VOCAB, (TOKENS,)).where(torch.arange(TOKENS) % 3 > 0, IGNORE)


def test_divergences_of_two_heads():
    student, teacher, labels = two_heads()
    heads, target = (*student[:2], *teacher[:2]), F.linear(*teacher).softmax(-1)
    options = {"temperature": 2.0, "ignore_index": IGNORE}
    loss = nn.LigerFusedLinearJSD(0.3, IGNORE, 2.0, torch.float32)(*heads, labels)
    assert torch.equal(loss, functional.linear_jsd(*heads, labels, beta=0.3, **options))
    without_labels = nn.LigerFusedLinearJSD(0.3, temperature=2.0)(*heads)
    assert torch.equal(without_labels, functional.linear_jsd(*heads, beta=0.3, temperature=2.0))
    for reduction in ("batchmean", "mean", "sum"):
        loss = nn.LigerFusedLinearKLDivLoss(reduction, IGNORE, 2.0, 1e-8)(*student[:2], target, labels)
        expected = functional.linear_kl_div(*student[:2], target, labels, reduction=reduction, eps=1e-8, **options)
        assert torch.equal(loss, expected)


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
def test_divergences_of_given_distributions():
    student, teacher, labels = two_heads()
    z, zt = F.linear(*student), F.linear(*teacher)
    log_p, log_q, p, q = zt.log_softmax(-1), z.log_softmax(-1), zt.softmax(-1), z.softmax(-1)
    for given in ((log_q, log_p), (log_q, log_p, labels)):
        assert torch.equal(nn.LigerJSD(0.3, IGNORE)(*given), functional.jsd(*given, beta=0.3, ignore_index=IGNORE))
    for reduction in ("none", "sum", "mean", "batchmean"):
        loss = nn.LigerTVDLoss(reduction, IGNORE)(q, p, labels)
        assert torch.equal(loss, functional.tvd(q, p, labels, reduction, IGNORE))
        for log_target, target in ((False, p), (True, log_p)):
            loss = nn.LigerKLDIVLoss(1e-8, reduction=reduction, log_target=log_target)(log_q, target)
            assert torch.equal(loss, functional.kl_div(log_q, target, reduction, log_target, 1e-8))
    assert nn.LigerKLDIVLoss().reduction == torch.nn.KLDivLoss().reduction
    ce_and_tvd = nn.LigerFusedCETVDLoss(IGNORE)(z, zt, labels)
    assert all(map(torch.equal, ce_and_tvd, functional.fused_ce_tvd(z, zt, labels, IGNORE)))


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 3])
@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.LigerFusedLinearJSDLoss, functional.linear_jsd),
        (nn.LigerFusedLinearCosineSimilarityLoss, functional.linear_cosine_distance),
    ],
)
def test_distillation_with_labels(module, function, vocab):
    student, teacher, labels = two_heads(vocab)
    heads, biases = (*student[:2], *teacher[:2], labels), (student[2], teacher[2])
    expected = function(
        *heads, beta=0.3, temperature=2.0, student_bias=biases[0], teacher_bias=biases[1], ignore_index=IGNORE,
        soft_weight=0.8, hard_weight=0.2, vocab_size=VOCAB, outputs=("soft_loss", "hard_loss"),
    )  # fmt: skip
    results = module(0.2, 0.8, 0.3, IGNORE, 2.0, True, 2, return_soft_hard_loss=True)(*heads, *biases)
    assert all(map(torch.equal, results, (expected.loss, expected.soft_loss, expected.hard_loss)))
    assert torch.equal(module(0.2, 0.8, 0.3, IGNORE, 2.0)(*heads, *biases), expected.loss)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_grpo_loss_has_ligers_results(loss_type):
    logits, ids = torch.randn(2, 5, 9), torch.randint(0, 9, (2, 4))
    old, ref, advantages = torch.randn(2, 4) - 2.0, torch.randn(2, 4) - 2.0, torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    options = {"temperature": 0.9, "beta": 0.04, "epsilon_high": 0.4, "loss_type": loss_type}
    loss, kl, clipped = nn.triton_grpo_loss(logits, old, ref, ids, advantages, mask, loss_type=loss_type)
    each = functional.grpo_loss(logits, ids, advantages, mask, old, ref, reduction="none", **options)
    for mine, expected in ((loss, each.loss), (kl, each.kl), (clipped, each.clipped)):
        torch.testing.assert_close(mine, expected)
    loss, metrics = nn.triton_grpo_loss(
        logits, old, ref, ids, advantages, mask, loss_type=loss_type, reduce=True, num_items_in_batch=torch.tensor(7)
    )
    items = 7 if loss_type == "dapo" else None
    expected = functional.grpo_loss(logits, ids, advantages, mask, old, ref, num_items=items, **options)
    torch.testing.assert_close((loss, *metrics), (expected.loss, expected.kl, expected.clipped))
    alone, metrics = nn.triton_grpo_loss(
        logits, None, None, ids, advantages, beta=0.0, loss_type=loss_type, reduce=True
    )
    assert alone.item() == pytest.approx(0.0, abs=1e-6)  # ratio 1, and as much advantage as disadvantage
    assert len(metrics) == 1


def test_vocab_parallel_cross_entropy_of_one_process():
    logits, target = torch.randn(5, 2, 12), torch.randint(0, 12, (5, 2))
    for smoothing in (0.0, 0.1):
        loss = LigerVocabParallelCrossEntropy(label_smoothing=smoothing)(logits, target)
        expected = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
        ).view(5, 2)
        torch.testing.assert_close(loss, expected)
    loss = LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_formula="megatron")(logits, target)
    log_probs = logits.log_softmax(-1)
    others = torch.ones_like(logits).scatter(-1, target.unsqueeze(-1), 0.0) / 11
    aimed = 0.1 * others + 0.9 * F.one_hot(target, 12)
    torch.testing.assert_close(loss, -(aimed * log_probs).sum(-1))


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"label_smoothing": 1.0},
        {"label_smoothing_formula": "keras"},
        {"label_smoothing_mode": "local"},
    ],
)
def test_vocab_parallel_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LigerVocabParallelCrossEntropy(**options)
