"""Distillation with two heads: float64, the losses of torch and TRL, kernels, backward protocol, errors, memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head.elementwise_divergence import jsd, kl_div, tvd
from liger_trainer.kernels.head.linear_jsd import linear_cosine_distance, linear_jsd, linear_jsd_reference, linear_kl
from liger_trainer.liger.operators.linear_kl_div import linear_kl_div, linear_kl_div_reference
from tests.device import assert_no_host_sync, peak_memory_of_one_run
from tests.kernels.head.heads import (
    EXAMPLES,
    IGNORE,
    MIB,
    assert_close,
    assert_refused,
    doubled,
    needing_gradients,
    recorded_matmuls,
    relative_error,
)

TOKENS, HIDDEN, TEACHER, VOCAB = 11, 6, 5, 20
FOUR_TOKENS = 2 * 4 * 64 * 4  # bytes of logits_memory: two buffers of 4 fp32 rows, each padded to 64 columns
OTHER_OPTIONS = {"teacher_softcap": 6.0, "student_logit_scale": 1.5, "teacher_logit_scale": -0.7, "soft_weight": 0.6}


def _case(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> Any:
    """Heads and hidden states (student hidden, weight, bias; teacher hidden, weight, bias) and labels."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (tokens, TEACHER), (VOCAB, TEACHER), (VOCAB,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    labels = torch.randint(0, VOCAB, (tokens,), generator=generator)
    labels[::4] = IGNORE
    return [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3:], labels


def _loss(student: Any, teacher: Any, labels: Any, function: Any = linear_jsd, **options: Any) -> Any:
    biases = {"student_bias": student[2], "teacher_bias": teacher[2]}
    if function is not linear_jsd_reference:
        options.setdefault("logits_memory", FOUR_TOKENS)
    return function(student[0], student[1], teacher[0], teacher[1], labels, **biases, **options)


def _log_probs(student: Any, teacher: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(F.linear(*heads).float().log_softmax(-1) for heads in (student, teacher))  # type: ignore[return-value]


@given(
    tokens=st.integers(0, 9),
    vocab=st.integers(8, 150),
    beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    temperature=st.sampled_from([1.0, 2.0]),
    softcap=st.sampled_from([None, 3.0]),
    hard_weight=st.sampled_from([0.0, 0.5]),
    reduction=st.sampled_from(["mean", "sum"]),
    num_items=st.sampled_from([None, 5]),
    labelled=st.booleans(),
    weighted=st.booleans(),
    vocab_size=st.sampled_from([None, 7]),
    memory=st.integers(1, 9000),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    half_teacher=st.booleans(),
    others=st.sampled_from([{}, OTHER_OPTIONS]),
    seed=st.integers(0, 99),
)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_loss_and_gradients_equal_the_reference(
    backend: tuple[str, torch.dtype], tokens: int, vocab: int, beta: float, temperature: float, softcap: float | None,
    hard_weight: float, reduction: str, num_items: int | None, labelled: bool, weighted: bool, vocab_size: int | None,
    memory: int, trained: tuple[bool, bool, bool], half_teacher: bool, others: dict[str, Any], seed: int,
) -> None:  # fmt: skip
    device, dtype = backend
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 4), (vocab, 4), (vocab,))
    leaves = [
        torch.randn(shape, generator=generator).to(*backend).requires_grad_(t) for shape, t in zip(shapes, trained)
    ]
    # Small integers: their bf16 products are exact, so that the teacher's logits do not depend on who multiplies them.
    teacher = [
        torch.randint(-3, 4, shape, generator=generator).to(device, torch.bfloat16 if half_teacher else dtype)
        for shape in ((tokens, 3), (vocab, 3))
    ]
    labels = torch.randint(0, vocab_size or vocab, (tokens,), generator=generator).to(device)
    labels[1::2] = IGNORE
    options: dict[str, Any] = {
        "beta": beta,
        "temperature": temperature,
        "student_softcap": softcap,
        "hard_weight": hard_weight if labelled else 0.0,
        "reduction": reduction,
        "num_items": num_items,
        "token_weights": torch.rand(tokens, generator=generator).to(*backend) if weighted else None,
        "vocab_size": vocab_size,
        **others,
    }
    labels = labels if labelled else None
    doubles = doubled(leaves)
    ours = linear_jsd(*leaves[:2], *teacher, labels, student_bias=leaves[2], logits_memory=memory, **options)
    teacher = [tensor.double() for tensor in teacher]
    exact = linear_jsd_reference(*doubles[:2], *teacher, labels, student_bias=doubles[2], **options)
    assert_close(ours, exact)
    if any(trained):
        upstream = torch.tensor(1.75, device=device)
        gradients = torch.autograd.grad(ours, needing_gradients(leaves), upstream.to(dtype))
        truth = torch.autograd.grad(exact, needing_gradients(doubles), upstream.double())
        for mine, theirs in zip(gradients, truth):
            assert_close(mine, theirs)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_reference_is_built_from_torchs_kl_div(beta: float) -> None:
    student, teacher, labels = _case()
    ls, lt = _log_probs((student[0], student[1], student[2]), teacher)
    lm = torch.logsumexp(torch.stack([ls + torch.tensor(1 - beta).log(), lt + torch.tensor(beta).log()]), 0)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)[labels != IGNORE].mean()

    expected = {0.0: kl(lt, ls), 1.0: kl(ls, lt)}.get(beta, beta * kl(lt, lm) + (1 - beta) * kl(ls, lm))
    torch.testing.assert_close(_loss(student, teacher, labels, linear_jsd_reference, beta=beta), expected)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_equals_trl(beta: float) -> None:
    trainer = pytest.importorskip("trl.trainer.distillation_trainer")
    student, teacher, labels = _case()
    for num_items in (None, torch.tensor(17)):
        theirs, entropy, _ = trainer._chunked_divergence_loss(
            student[0][None], teacher[0][None], student[1], teacher[1], (labels != IGNORE)[None], beta,
            num_items_in_batch=num_items, student_lm_head_bias=student[2], teacher_lm_head_bias=teacher[2],
            student_logit_scale=1.5, teacher_logit_scale=0.5, student_final_logit_softcapping=4.0, temperature=0.8,
        )  # fmt: skip
        ours = _loss(
            student, teacher, labels, beta=beta, num_items=num_items, student_logit_scale=1.5, teacher_logit_scale=0.5,
            student_softcap=4.0, temperature=0.8, outputs=("entropy",),
        )  # fmt: skip
        torch.testing.assert_close(ours.loss, theirs)
        torch.testing.assert_close(ours.entropy.sum(), entropy)
        torch.testing.assert_close(torch.autograd.grad(ours.loss, student), torch.autograd.grad(theirs, student))


def test_kl_is_jsd_at_its_ends() -> None:
    student, teacher, labels = _case()
    for reverse in (False, True):
        kl = _loss(student, teacher, labels, linear_kl, reverse=reverse)
        assert kl.equal(_loss(student, teacher, labels, beta=float(reverse)))


def test_cosine_distance() -> None:
    student, teacher, labels = _case(torch.float64)
    ours = _loss(student, teacher, labels, linear_cosine_distance, beta=0.7, temperature=2.0)
    z, zt = F.linear(*student), F.linear(*teacher)
    expected = 0.7 * (1 - F.cosine_similarity(z, zt, dim=-1))[labels != IGNORE].mean()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, student), torch.autograd.grad(expected, student))


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_kl_div_of_given_probabilities_is_torchs(reduction: str) -> None:
    student, teacher, labels = _case(torch.float64)
    probs = F.linear(*teacher).softmax(-1)
    probs[1, 3] = 0.0  # no longer summing to 1
    valid = labels != IGNORE
    log_probs = (F.linear(*student) / 2.0).log_softmax(-1)
    expected = F.kl_div(log_probs[valid], probs[valid], reduction=reduction)
    for function in (linear_kl_div, linear_kl_div_reference):
        loss = function(student[0], student[1], probs, labels, student[2], temperature=2.0, reduction=reduction)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, student), torch.autograd.grad(expected, student, retain_graph=True)
        )
    result = linear_kl_div(student[0], student[1], probs, labels, student[2], temperature=2.0, reduction=reduction,
                           outputs=("soft_loss",))  # fmt: skip
    torch.testing.assert_close(result.soft_loss, expected.detach())


def test_outputs() -> None:
    student, teacher, labels = _case()
    weights = torch.rand(TOKENS)
    result = _loss(
        student, teacher, labels, beta=0.0, soft_weight=0.3, hard_weight=0.5, token_weights=weights, temperature=2.0,
        outputs=("soft_loss", "hard_loss", "entropy", "token_divergence"),
    )  # fmt: skip
    z, zt = F.linear(*student).detach(), F.linear(*teacher)
    valid = labels != IGNORE
    lt, ls = (zt / 2).log_softmax(-1), (z / 2).log_softmax(-1)
    divergence = torch.where(valid, (lt.exp() * (lt - ls)).sum(-1), 0.0)
    torch.testing.assert_close(result.token_divergence, divergence)
    torch.testing.assert_close(result.entropy, torch.where(valid, -(ls.exp() * ls).sum(-1), 0.0))
    torch.testing.assert_close(result.soft_loss, (divergence * weights).sum() / valid.sum())
    nll = F.cross_entropy(z, labels, reduction="none")
    torch.testing.assert_close(result.hard_loss, (nll * weights).sum() / valid.sum())
    torch.testing.assert_close(result.loss.detach(), 0.3 * result.soft_loss + 0.5 * result.hard_loss)
    assert not any(getattr(result, name).requires_grad for name in ("soft_loss", "hard_loss", "entropy"))


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_only_the_matmuls_that_are_needed(trained: tuple[int, ...]) -> None:
    student, teacher, labels = _case()
    for index, leaf in enumerate(student):
        leaf.requires_grad_(index in trained)
    teacher[0].requires_grad_()  # and gets nothing
    with recorded_matmuls() as matmuls:
        loss = _loss(student, teacher, labels)
        if trained:
            loss.backward()
    assert len(matmuls) == 3 * (2 + (0 in trained) + (1 in trained))  # three chunks of four tokens
    assert [leaf.grad is not None for leaf in student] == [index in trained for index in range(3)]
    assert teacher[0].grad is None
    assert loss.requires_grad == bool(trained)


def test_padding_of_either_head_takes_no_part() -> None:
    student, teacher, labels = _case()
    padded = torch.cat([teacher[1], torch.full((4, TEACHER), 9.0)])
    with pytest.raises(ValueError, match=r"20 rows and the teacher's 24.*vocab_size=20"):
        linear_jsd(student[0], student[1], teacher[0], padded, labels)
    expected = linear_jsd(student[0], student[1], teacher[0], teacher[1], labels)
    assert linear_jsd(student[0], student[1], teacher[0], padded, labels, vocab_size=VOCAB).equal(expected)
    wide = torch.cat([student[1].detach(), torch.full((4, HIDDEN), 9.0)]).requires_grad_()
    bias = torch.zeros(VOCAB + 4, requires_grad=True)
    loss = linear_jsd(student[0], wide, teacher[0], teacher[1], labels, vocab_size=VOCAB, student_bias=bias)
    loss.backward()
    assert loss.equal(expected)
    torch.testing.assert_close(wide.grad[:VOCAB], torch.autograd.grad(expected, student[1])[0])
    assert not wide.grad[VOCAB:].any()
    assert not bias.grad[VOCAB:].any()


def test_given_probabilities_may_be_wider_than_what_is_compared() -> None:
    """The first classes alone, whatever probability the others have; their rows of the head get no gradient."""
    student, _, labels = _case()
    hidden, weight = (tensor.detach().requires_grad_() for tensor in student[:2])
    target = torch.randn(TOKENS, VOCAB).softmax(-1)
    loss = linear_kl_div(hidden, weight, target, labels, vocab_size=13)
    loss.backward()
    expected = linear_kl_div(student[0], student[1][:13], target[:, :13].contiguous(), labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(weight.grad[:13], torch.autograd.grad(expected, student[1])[0][:13])
    assert not weight.grad[13:].any()


LOSSES: dict[str, Any] = {
    "forward_kl": lambda *heads: linear_jsd(*heads, beta=0.0, reduction="sum"),
    "reverse_kl": lambda *heads: linear_jsd(*heads, beta=1.0, reduction="sum"),
    "jsd": lambda *heads: linear_jsd(*heads, beta=0.5, reduction="sum"),
    "cosine": lambda *heads: linear_cosine_distance(*heads, reduction="sum"),
    "given": lambda hidden, weight, *teacher: linear_kl_div(
        hidden, weight, F.linear(*(tensor.double() for tensor in teacher)).softmax(-1), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_to_half_precision(name: str, dtype: torch.dtype) -> None:
    """The gradient is a difference of two heads that nearly agree, so a rounded logit would be most of it."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(192, 64, generator=generator).to(dtype)  # with few, a single one can be most of the gradient
    weight = (torch.randn(300, 64, generator=generator) * 8 / 64**0.5).to(dtype)
    near = (weight.float() * (1 + torch.randn(300, 64, generator=generator) / 100)).to(dtype)
    half = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    double = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    ours = torch.autograd.grad(LOSSES[name](*half, hidden, near), half)
    exact = torch.autograd.grad(LOSSES[name](*double, hidden.double(), near.double()), double)
    for gradient, truth in zip(ours, exact):
        assert gradient.dtype == dtype
        assert (gradient.double() - truth).norm() < 0.012 * truth.norm()


def test_retained_graph_gives_the_right_gradient_for_every_upstream_gradient() -> None:
    student, teacher, labels = _case()
    loss = _loss(student, teacher, labels)
    expected = torch.autograd.grad(_loss(student, teacher, labels, linear_jsd_reference), student)
    for upstream in (1.0, 2.0, 0.0, 2.0, -0.5, 1.0):
        gradients = torch.autograd.grad(loss, student, torch.tensor(upstream), retain_graph=True)
        torch.testing.assert_close(gradients, tuple(upstream * gradient for gradient in expected))


def test_the_expected_upstream_gradient_leaves_the_gradients_untouched() -> None:
    student, teacher, labels = _case(torch.bfloat16)
    upstream = torch.tensor(1 / 3)
    loss = _loss(student, teacher, labels, reduction="sum", expected_grad=upstream)
    with mock.patch.object(torch.Tensor, "mul_", side_effect=AssertionError("the gradients were scaled")):
        gradients = torch.autograd.grad(loss, student, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(_loss(student, teacher, labels, num_items=3), student))


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_learn_is_a_zero_that_backpropagates(tokens: int) -> None:
    student, teacher, labels = _case(tokens=tokens)
    for options in ({}, {"hard_weight": 0.5}, {"num_items": 0}):
        loss = _loss(student, teacher, torch.full_like(labels, IGNORE), **options)
        gradients = torch.autograd.grad(loss, student)
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in gradients)


def test_a_class_that_only_the_student_excludes_is_infinitely_far() -> None:
    student, teacher, labels = _case()
    mask = student[2].detach().index_fill(0, torch.tensor([2]), -float("inf"))
    heads = (student[0], student[1], teacher[0], teacher[1], labels)
    assert linear_jsd(*heads, beta=0.0, student_bias=mask).item() == float("inf")
    assert linear_jsd(*heads, beta=0.5, student_bias=mask).isfinite()


def test_loss_is_fp32_and_dtypes_may_differ_between_the_models() -> None:
    student, teacher, labels = _case(torch.bfloat16)
    widened = [tensor.float() for tensor in teacher]
    loss, wide = _loss(student, teacher, labels), _loss(student, widened, labels)
    assert loss.dtype == wide.dtype == torch.float32
    torch.testing.assert_close(loss, wide, rtol=2e-2, atol=0.0)


def test_batched_and_strided_inputs() -> None:
    student, teacher, labels = _case(tokens=12)
    hidden = student[0].detach().view(3, 4, HIDDEN).transpose(0, 1).requires_grad_()
    other = teacher[0].view(3, 4, TEACHER).transpose(0, 1)
    loss = linear_jsd(hidden, student[1], other, teacher[1], labels.view(3, 4).t(), logits_memory=FOUR_TOKENS)
    expected = linear_jsd(student[0], student[1], teacher[0], teacher[1], labels)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(expected, student[0])
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], gradient.view(3, 4, HIDDEN).transpose(0, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"student_hidden": torch.zeros(11, 7)}, ["`student_hidden`", "(11, 7)", "(20, 6)"]),
        ({"teacher_weight": torch.zeros(20, 6)}, ["`teacher_hidden`", "(11, 5)", "(20, 6)"]),
        ({"teacher_hidden": torch.zeros(10, 5)}, ["(11, 6)", "(10, 5)", "same tokens"]),
        ({"teacher_weight": torch.zeros(20, 5).half()}, ["`teacher_hidden`", "float32", "float16", "cast"]),
        ({"teacher_weight": torch.zeros(20, 5, device="meta")}, ["`teacher_weight`", "meta"]),
        ({"student_bias": torch.zeros(19)}, ["`student_bias`", "(19,)", "(20,)"]),
        ({"labels": torch.zeros(10, dtype=torch.int64)}, ["`labels`", "(10,)", "(11,)"]),
        ({"labels": torch.zeros(11)}, ["`labels`", "float32", "int64"]),
        ({"labels": torch.full((11,), 20), "hard_weight": 1.0}, ["label 20", "[0, 20)"]),
        ({"labels": None, "hard_weight": 1.0}, ["`hard_weight`", "needs `labels`"]),
        ({"token_weights": torch.ones(11, dtype=torch.int64)}, ["`token_weights`", "int64"]),
        ({"beta": 1.5}, ["`beta`", "1.5", "[0, 1]"]),
        ({"temperature": 0.0}, ["`temperature`", "more than 0"]),
        ({"teacher_softcap": -1.0}, ["`teacher_softcap`", "more than 0"]),
        ({"reduction": "none"}, ["`reduction`", "'mean' or 'sum'"]),
        ({"num_items": torch.ones(2)}, ["`num_items`", "(2,)"]),
        ({"num_items": -1}, ["`num_items`", "-1"]),
        ({"vocab_size": 21}, ["`vocab_size`", "21", "[1, 20]"]),
        ({"outputs": ("loss",)}, ["['loss']", "'entropy'"]),
        ({"outputs": "entropy"}, ["`outputs`", "tuple"]),
        ({"logits_memory": 0}, ["`logits_memory`", "at least 1 byte"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    student, teacher, labels = _case()
    arguments = {
        "student_hidden": student[0],
        "student_weight": student[1],
        "teacher_hidden": teacher[0],
        "teacher_weight": teacher[1],
        "labels": labels,
    }
    assert_refused(linear_jsd, words, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": torch.rand(11, 19)}, ["20", "19", "vocab_size=19"]),
        ({"target": torch.rand(10, 20)}, ["`target`", "(10, 20)", "(11, 20)"]),
        ({"target": torch.zeros(11, 20, dtype=torch.int64)}, ["`target`", "int64"]),
        ({"reduction": "none"}, ["`reduction`", "'batchmean'"]),
    ],
)
def test_errors_of_given_probabilities(changes: dict[str, Any], words: list[str]) -> None:
    student, _, labels = _case()
    arguments = {"hidden": student[0], "weight": student[1], "target": torch.rand(11, 20), "labels": labels}
    assert_refused(linear_kl_div, words, **{**arguments, **changes})


# Real shapes, memory and waiting on a GPU.


def _heads(tokens: int, size: int, other: int, vocab: int, scale: float = 2.0) -> Any:
    """Hidden states and heads of student and teacher in bf16, and labels of which every fifth is ignored."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    student = [normal(tokens, size), normal(vocab, size) * (scale / size**0.5)]
    teacher = [normal(tokens, other), normal(vocab, other) * (scale / other**0.5)]
    labels = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    labels[::5] = IGNORE
    return [tensor.requires_grad_() for tensor in student], teacher, labels


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_gradients_are_as_close_to_float64_as_rounded_gradients(beta: float, softcap: float | None) -> None:
    student, teacher, labels = _heads(512, 1024, 768, 128256, scale=3.0)
    options: dict[str, Any] = {"beta": beta, "temperature": 1.5, "student_softcap": softcap, "teacher_softcap": softcap}
    doubles = doubled(student)
    exact_loss = linear_jsd_reference(*doubles, *(tensor.double() for tensor in teacher), labels, **options)
    exact = torch.autograd.grad(exact_loss, doubles)
    loss = linear_jsd(*student, *teacher, labels, **options)
    ours = torch.autograd.grad(loss, student)
    assert abs(loss.item() - exact_loss.item()) < 1e-3 * (1.0 + exact_loss.item())
    for mine, truth in zip(ours, exact):
        assert relative_error(mine, truth) < 4e-3  # bf16 rounds once in the logits' gradient and once here: 1.7e-3 each
    again = torch.autograd.grad(linear_jsd(*student, *teacher, labels, **options), student)
    assert all(first.equal(second) for first, second in zip(ours, again))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("near", [False, True])
def test_gpu_logits_are_not_rounded_to_half_precision(dtype: torch.dtype, beta: float, near: bool) -> None:
    """As Liger's test_logits_projection_is_not_rounded_to_input_dtype has it, and with a teacher near the student."""
    tokens, size, vocab = 256, 1024, 32000
    generator = torch.Generator("cuda").manual_seed(0)
    hiddens = [torch.randn(tokens, size, generator=generator, device="cuda").to(dtype) for _ in range(2)]
    scale = (10.0 if beta == 0.5 else 30.0) / size**0.5
    weights = [torch.randn(vocab, size, generator=generator, device="cuda") * scale for _ in range(2)]
    student = [hiddens[0].requires_grad_(), weights[0].to(dtype).requires_grad_()]
    teacher = [hiddens[1], weights[1].to(dtype)]
    if near:
        teacher = [hiddens[0].detach(), (weights[0] + weights[1] / 100).to(dtype)]
    doubles = doubled(student)
    exact_loss = linear_jsd_reference(*doubles, *(tensor.double() for tensor in teacher), beta=beta, reduction="sum")
    exact = torch.autograd.grad(exact_loss, doubles)
    ours = torch.autograd.grad(linear_jsd(*student, *teacher, beta=beta, reduction="sum"), student)
    for mine, truth in zip(ours, exact):
        assert relative_error(mine, truth) < 5e-3
        assert float((mine.double() - truth).abs().max() / truth.abs().max()) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.0, "hard_weight": 0.5, "outputs": ("entropy", "soft_loss")}, {"num_items": 100}],
    ids=["plain", "hard", "num_items"],
)
def test_nothing_synchronises(options: dict[str, Any]) -> None:
    student, teacher, labels = _heads(1000, 256, 128, 5003)
    probs = torch.rand(1000, 5003, device="cuda")
    log_probs = torch.randn(1000, 5003, device="cuda", requires_grad=True)

    def step() -> None:
        result = linear_jsd(*student, *teacher, labels, logits_memory=4 * MIB, **options)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss = loss + linear_kl_div(*student, probs, labels, logits_memory=2 * MIB)
        for function in (kl_div, jsd, tvd):
            loss = loss + function(log_probs, probs, labels=labels)
        (2.0 * loss).backward()

    assert_no_host_sync(step)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
def test_peak_memory_is_two_buffers_and_gradients(frozen: bool) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    student, teacher, labels = _heads(tokens, size, 2048, vocab)
    student[1].requires_grad_(not frozen)
    linear_jsd(*student, *teacher, labels).backward()  # workspaces and compiled kernels
    student[0].grad = student[1].grad = None
    before = torch.cuda.memory_allocated()
    peak = peak_memory_of_one_run(lambda: (2.0 * linear_jsd(*student, *teacher, labels)).backward())
    buffers, d_hidden = 2 * 1024 * vocab * 4, 2 * tokens * size
    d_weight = 0 if frozen else 2 * vocab * size
    slack = 5 * MIB  # exponents, and up to 1 MiB of every block that the allocator does not split off
    assert peak <= buffers + d_hidden + d_weight + slack
    assert torch.cuda.memory_allocated() - before <= d_hidden + d_weight + slack
