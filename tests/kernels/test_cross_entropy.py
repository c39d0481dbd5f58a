"""Cross entropy's references against torch and float64 differentiation, its checks, and its kernels' compilation."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head import cross_entropy as operator
from liger_trainer.kernels.head import cross_entropy_kernel
from liger_trainer.kernels.head import rescale as _rescale
from liger_trainer.kernels.head.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.head.cross_entropy_torch import row_statistics_torch_
from liger_trainer.kernels.head.row_statistics import RowOptions, RowStats
from tests.aot import TARGETS, compile_launch, recorded_launches

IGNORE = -100
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 4.0, "logit_scale": 1.5, "temperature": 0.8}


def _case(tokens: int, vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(tokens, vocab_size, generator=generator, dtype=torch.float64)
    target = torch.randint(0, vocab_size, (tokens,), generator=generator)
    target[::3] = IGNORE
    return logits.requires_grad_(), target


@given(
    tokens=st.integers(1, 9),
    vocab_size=st.integers(1, 40),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_reference_is_torchs_cross_entropy(
    tokens: int, vocab_size: int, reduction: str, smoothing: float, weighted: bool, seed: int
) -> None:
    logits, target = _case(tokens + 1, vocab_size, seed)  # at least one valid token, or torch's mean is NaN
    weights = torch.rand(vocab_size, dtype=torch.float64) + 0.1 if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    expected = F.cross_entropy(logits, target, weight=weights, **options)
    loss = cross_entropy(logits, target, class_weights=weights, **options)
    torch.testing.assert_close(loss, expected)
    upstream = torch.rand_like(loss)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits, upstream), torch.autograd.grad(expected, logits, upstream)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_row_step_in_torch_is_the_derivative_of_the_reference(reduction: str, weighted: bool) -> None:
    logits, target = _case(8, 11)
    weights = torch.rand(11, dtype=torch.float64) if weighted else None
    rows = cross_entropy_reference(logits, target, reduction="none", class_weights=weights, **EVERYTHING)
    upstream = torch.rand(8, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rows, logits, upstream)
    buffer = logits.detach().clone()
    stats = RowStats.allocate(buffer, 8, entropy=True, predicted=True)
    options = RowOptions(IGNORE, *EVERYTHING.values())
    row_statistics_torch_(buffer, target, stats, options, None, weights, upstream)
    torch.testing.assert_close(stats.loss, rows.detach())
    torch.testing.assert_close(buffer, expected)


def test_gradcheck() -> None:
    logits, target = _case(5, 7)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, **EVERYTHING), logits)


def test_outputs_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 5.0, 1.0]])
    target = torch.tensor([0, 1, IGNORE])
    result = cross_entropy(
        logits, target, z_loss=0.5, outputs=("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")
    )
    log_probs = logits.log_softmax(-1)
    lse = logits.logsumexp(-1)
    assert result.predicted_tokens.tolist() == [0, 2, -1]
    assert result.token_accuracy.item() == 0.5
    torch.testing.assert_close(result.z_loss, 0.5 * lse[:2].square().mean())
    torch.testing.assert_close(result.token_nll, torch.stack([-log_probs[0, 0], -log_probs[1, 1], torch.tensor(0.0)]))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(result.entropy, torch.cat([entropy[:2], torch.zeros(1)]))
    torch.testing.assert_close(result.loss, result.token_nll.sum() / 2 + result.z_loss)


@pytest.mark.parametrize("num_items", [7, torch.tensor(7), torch.tensor([7.0])])
def test_num_items_is_the_normaliser(num_items: Any) -> None:
    logits, target = _case(6, 5)
    expected = F.cross_entropy(logits, target, reduction="sum") / 7
    for reduction in ("mean", "sum"):
        torch.testing.assert_close(cross_entropy(logits, target, reduction=reduction, num_items=num_items), expected)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"num_items": 0}])
def test_all_ignored_is_a_zero_that_backpropagates(options: dict[str, Any]) -> None:
    logits = torch.full((4, 5), float("nan"), requires_grad=True)
    loss = cross_entropy(logits, torch.full((4,), IGNORE), **options)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_loss_is_fp32_for_half_precision_logits() -> None:
    logits, target = _case(6, 5)
    for dtype in (torch.bfloat16, torch.float16):
        assert cross_entropy(logits.to(dtype), target).dtype == torch.float32


def test_nan_in_the_input_gives_a_nan_loss() -> None:
    logits, target = _case(6, 5)
    poisoned = logits.detach().clone()
    poisoned[1, 2] = float("nan")
    assert cross_entropy(poisoned, target).isnan()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reduction": "avg"}, ["`reduction`", "'avg'", "'mean'"]),
        ({"label_smoothing": 1.5}, ["`label_smoothing`", "1.5", "[0, 1]"]),
        ({"temperature": 0.0}, ["`temperature`", "more than 0"]),
        ({"softcap": -1.0}, ["`softcap`", "more than 0"]),
        ({"num_items": 3, "reduction": "none"}, ["`num_items`", "'none'"]),
        ({"num_items": -3}, ["`num_items`", "-3"]),
        ({"num_items": torch.ones(2)}, ["`num_items`", "(2,)"]),
        ({"outputs": ("entropy", "accuracy")}, ["['accuracy']", "'token_accuracy'"]),
        ({"outputs": "entropy"}, ["`outputs`", "tuple"]),
        ({"class_weights": torch.ones(4)}, ["`class_weights`", "(4,)", "(5,)"]),
        ({"target": torch.zeros(5, dtype=torch.int64)}, ["`target`", "(5,)", "(6,)"]),
        ({"target": torch.zeros(6)}, ["`target`", "float32", "int64"]),
        ({"target": torch.full((6,), 5)}, ["label 5", "[0, 5)", "vocabulary"]),
        ({"target": torch.full((6,), -1)}, ["label -1", "ignore_index=-100"]),
        ({"logits": torch.zeros(6, 5, dtype=torch.int64)}, ["`logits`", "int64"]),
        ({"logits": torch.zeros(6, 0)}, ["vocabulary is empty"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    logits, target = _case(6, 5)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        cross_entropy(**{"logits": logits, "target": target, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_empty_batch() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.shape == (0, 5)


def test_compiles_to_one_graph() -> None:
    logits, target = _case(6, 5)
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    loss, expected = compiled(logits, target, z_loss=0.1), cross_entropy(logits, target, z_loss=0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_operators_pass_opcheck() -> None:
    logits, target = _case(6, 5)
    logits = logits.detach().float().requires_grad_()
    options = (IGNORE, 0.1, 0.1, 5.0, 1.0, 1.0)
    torch.library.opcheck(operator._forward, (logits, target, None, *options, True, True, False))
    nll, lse, logits = torch.rand(6), torch.rand(6), logits.detach()
    torch.library.opcheck(operator._backward, (torch.ones(6), logits, target, nll, lse, None, *options))
    torch.library.opcheck(operator._backward_, (torch.ones(6), logits, target, nll, lse, None, *options))
    buffer, one = torch.zeros_like(logits), torch.ones(())
    torch.library.opcheck(operator._gradient_, (logits, buffer, target, None, one, *options, True, True))
    torch.library.opcheck(operator._reduce, (logits.requires_grad_(), buffer, nll, one, one))
    torch.library.opcheck(_rescale.rescale_, (torch.ones(6), torch.tensor(2.0), torch.tensor(1.0)))


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    logits, target = torch.empty(2, 20000, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    weights = torch.ones(20000)
    plain, full = RowOptions(IGNORE, 0.0, 0.0, None, 1.0, 1.0), RowOptions(IGNORE, *EVERYTHING.values())
    bare, stats = RowStats.allocate(logits, 2, False, False), RowStats.allocate(logits, 2, True, True)
    hip = "6.4" if target_name.startswith("gfx") else None
    with (
        recorded_launches() as launches,
        mock.patch.object(cross_entropy_kernel, "use_triton", return_value=True),
        mock.patch.object(_rescale, "use_triton", return_value=True),
        mock.patch.object(torch.version, "hip", hip),
    ):
        cross_entropy_kernel.row_statistics_(logits, target, bare, plain)
        cross_entropy_kernel.row_statistics_(logits, target, bare, plain, coefficient=torch.ones(()))
        cross_entropy_kernel.row_statistics_(logits, target, stats, full, weights, weights, torch.ones(2))
        cross_entropy_kernel.row_statistics_(
            logits, target, bare, plain, coefficient=torch.ones(()), out=torch.empty_like(logits)
        )
        cross_entropy_kernel.row_gradient_(logits, target, bare, plain, torch.ones(()), out=torch.empty_like(logits))
        cross_entropy_kernel.row_gradient_(logits, target, bare, full, torch.ones(2), weights, weights)
        _rescale.rescale_(torch.ones(8, dtype=dtype), torch.ones(()), torch.ones(()))
    assert len(launches) == 7
    for launch in launches:
        assert compile_launch(launch, target_name) is not None
