"""Distillation with both heads on the CPU: float64, torch's and TRL's own losses, backward protocol, errors, AOT."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head import divergence_kernel
from liger_trainer.kernels.head import linear_divergence as _linear_divergence
from liger_trainer.kernels.head.divergence_options import DivergenceOptions, DivergenceStats
from liger_trainer.kernels.head.linear_jsd import linear_cosine_distance, linear_jsd, linear_jsd_reference, linear_kl
from liger_trainer.kernels.parity.linear_kl_div import linear_kl_div, linear_kl_div_reference
from tests.aot import compile_launch, on_targets, recorded_launches

IGNORE = -100
TOKENS, HIDDEN, TEACHER, VOCAB = 11, 6, 5, 20
FOUR_TOKENS = 2 * 4 * 64 * 4  # bytes of logits_memory: two buffers of 4 fp32 rows, each padded to 64 columns
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "student_softcap": 4.0,
    "teacher_softcap": 6.0,
    "student_logit_scale": 1.5,
    "teacher_logit_scale": -0.7,
    "soft_weight": 0.6,
    "hard_weight": 0.4,
}


def _case(dtype: torch.dtype = torch.float32, tokens: int = TOKENS, seed: int = 0) -> Any:
    """Heads and hidden states (student hidden, weight, bias; teacher hidden, weight, bias) and labels."""
    generator = torch.Generator().manual_seed(seed)
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
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_loss_and_gradients_equal_the_reference(
    tokens: int, beta: float, temperature: float, softcap: float | None, hard_weight: float, reduction: str,
    num_items: int | None, labelled: bool, weighted: bool, vocab_size: int | None, memory: int, seed: int,
) -> None:  # fmt: skip
    student, teacher, labels = _case(torch.float64, tokens, seed)
    labels = torch.where(labels == IGNORE, IGNORE, labels % (vocab_size or VOCAB)) if labelled else None
    options: dict[str, Any] = {
        "beta": beta,
        "temperature": temperature,
        "student_softcap": softcap,
        "hard_weight": hard_weight if labelled else 0.0,
        "reduction": reduction,
        "num_items": num_items,
        "token_weights": torch.rand(tokens, dtype=torch.float64) if weighted else None,
        "vocab_size": vocab_size,
    }
    ours = _loss(student, teacher, labels, logits_memory=memory, **options)
    expected = _loss(student, teacher, labels, linear_jsd_reference, **options)
    torch.testing.assert_close(ours, expected)
    upstream = torch.tensor(1.7, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(ours, student, upstream), torch.autograd.grad(expected, student, upstream)
    )


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


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradcheck(beta: float) -> None:
    student, teacher, labels = _case(torch.float64, 5)
    assert torch.autograd.gradcheck(
        lambda *leaves: _loss(leaves, teacher, labels, beta=beta, **EVERYTHING), tuple(student)
    )


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
    with (
        mock.patch.object(_linear_divergence.torch, "mm", side_effect=torch.mm) as mm,
        mock.patch.object(_linear_divergence.torch, "addmm", side_effect=torch.addmm) as addmm,
    ):
        loss = _loss(student, teacher, labels)
        if trained:
            loss.backward()
    assert mm.call_count + addmm.call_count == 3 * (2 + (0 in trained) + (1 in trained))  # three chunks of four tokens
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
    hidden = torch.randn(24, 64, generator=generator).to(dtype)
    weight = (torch.randn(300, 64, generator=generator) * 8 / 64**0.5).to(dtype)
    near = (weight.float() * (1 + torch.randn(300, 64, generator=generator) / 100)).to(dtype)
    half = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    double = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    ours = torch.autograd.grad(LOSSES[name](*half, hidden, near), half)
    exact = torch.autograd.grad(LOSSES[name](*double, hidden.double(), near.double()), double)
    for gradient, truth in zip(ours, exact):
        assert gradient.dtype == dtype
        assert (gradient.double() - truth).norm() < 0.005 * truth.norm()


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


def test_double_backward_is_refused() -> None:
    student, teacher, labels = _case()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(_loss(student, teacher, labels), student, create_graph=True)


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_learn_is_a_zero_that_backpropagates(tokens: int) -> None:
    student, teacher, labels = _case(tokens=tokens)
    for options in ({}, {"hard_weight": 0.5}, {"num_items": 0}):
        loss = _loss(student, teacher, torch.full_like(labels, IGNORE), **options)
        gradients = torch.autograd.grad(loss, student)
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_classes_masked_in_both_models_take_no_part(beta: float) -> None:
    student, teacher, labels = _case()
    masks = [bias.detach().index_fill(0, torch.tensor([2, 7]), -float("inf")) for bias in (student[2], teacher[2])]
    kept = [index for index in range(VOCAB) if index not in (2, 7)]
    leaf = student[0]
    loss = linear_jsd(leaf, student[1], teacher[0], teacher[1], labels, beta, 1.0, masks[0], masks[1])
    heads = (leaf, student[1][kept], teacher[0], teacher[1][kept])
    expected = linear_jsd(*heads, labels, beta, 1.0, masks[0][kept], masks[1][kept])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf), torch.autograd.grad(expected, leaf))


def test_a_class_that_only_the_student_excludes_is_infinitely_far() -> None:
    student, teacher, labels = _case()
    mask = student[2].detach().index_fill(0, torch.tensor([2]), -float("inf"))
    heads = (student[0], student[1], teacher[0], teacher[1], labels)
    assert linear_jsd(*heads, beta=0.0, student_bias=mask).item() == float("inf")
    assert linear_jsd(*heads, beta=0.5, student_bias=mask).isfinite()


def test_nan_in_either_model_gives_a_nan_loss() -> None:
    for poisoned in (0, 3):
        student, teacher, labels = _case()
        tensors = [tensor.detach().clone() for tensor in (*student, *teacher)]
        tensors[poisoned][1, 0] = float("nan")
        for beta in (0.0, 0.5, 1.0):
            assert _loss(tensors[:3], tensors[3:], labels, beta=beta).isnan()


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


def test_compiles_to_one_graph() -> None:
    student, teacher, labels = _case()

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        scaled = (leaves[0] * 2.0, *leaves[1:])
        result = _loss(scaled, teacher, labels, hard_weight=0.5, outputs=("entropy", "soft_loss"))
        return 3.0 * result.loss

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(*student), step(*student)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, student), torch.autograd.grad(expected, student))


def test_operator_passes_opcheck() -> None:
    student, teacher, labels = _case()
    one = torch.ones(())
    options = ("jsd", 0.3, 0.8, 0.6, 0.4, 4.0, 1.5, None, 1.0, 0.0, IGNORE, VOCAB, FOUR_TOKENS)
    torch.library.opcheck(
        _linear_divergence._linear_divergence,
        (*student, *teacher, labels, torch.rand(TOKENS), one, one, *options, True, True, True, True, True),
    )


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
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        linear_jsd(**{**arguments, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


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
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        linear_kl_div(**{**arguments, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def _row_launches(dtype: torch.dtype, target: str = "sm_90") -> list[Any]:
    student, teacher = torch.empty(2, 20032, dtype=dtype), torch.empty(2, 20032, dtype=dtype)
    labels, bias = torch.zeros(2, dtype=torch.int64), torch.ones(20000)
    lean, full = (DivergenceStats.allocate(student, 2, extra, extra) for extra in (False, True))
    with (
        recorded_launches() as launches,
        mock.patch.object(divergence_kernel, "use_triton", return_value=True),
        mock.patch.object(divergence_kernel, "has_lg2", return_value=target.startswith("sm_")),
    ):
        for divergence in ("forward_kl", "reverse_kl", "jsd", "probs_kl", "cosine"):
            plain = DivergenceOptions(divergence, 0.5, 1.0, 1.0, 0.0, None, 1.0, None, 1.0, 1e-10, IGNORE)
            capped = plain._replace(student_softcap=5.0, teacher_softcap=7.0, hard_weight=0.5)
            rows = (student[:, :20000], teacher[:, :20000])
            divergence_kernel.divergence_rows_(*rows, None, lean, plain, None, None, torch.ones(()), 20032, 20032)
            memory = divergence_kernel.gradient_memory(student, torch.bfloat16, divergence)[:, :20000]
            last = (bias, bias, torch.ones(2), 20032, 20032, memory)
            divergence_kernel.divergence_rows_(*rows, labels, full, capped, *last)
        divergence_kernel.divergence_rows_(*rows, labels, lean, plain)
    return launches


@pytest.mark.parametrize(("target_name", "dtype"), on_targets((torch.bfloat16,), (torch.float32,)))
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    launches = _row_launches(dtype, target_name)
    assert len(launches) == 11
    for launch in launches:
        assert compile_launch(launch, target_name) is not None


def test_rows_are_read_128_bits_at_a_time() -> None:
    for launch, accesses in zip(_row_launches(torch.bfloat16)[:6:2], (5, 5, 7)):
        assembly = compile_launch(launch, "sm_90").asm["ptx"]
        wide = assembly.count("ld.global.v4.b32") + assembly.count("st.global.v4.b32")
        assert wide == accesses, launch.arguments["DIVERGENCE"]
        assert "ld.global.b16" not in assembly
        assert ("lg2.approx" in assembly) == (launch.arguments["DIVERGENCE"] == "jsd")
