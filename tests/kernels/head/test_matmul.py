"""Half-precision matmuls of heads whose vocabulary is no multiple of 8: cuBLAS's reduction flags around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from liger_trainer.kernels import runtime
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_jsd import linear_jsd
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs
from liger_trainer.kernels.runtime import fp32_reductions
from liger_trainer.liger.operators.linear_grouped_loss import linear_grouped_loss

BF16 = "allow_bf16_reduced_precision_reduction"
FP16 = "allow_fp16_reduced_precision_reduction"
MATMUL = torch.backends.cuda.matmul


def _flags() -> tuple[bool, bool]:
    return getattr(MATMUL, BF16), getattr(MATMUL, FP16)


@pytest.fixture(autouse=True)
def _unchanged_at_the_end() -> Iterator[None]:
    assert _flags() == (True, True)  # PyTorch's defaults
    yield
    assert _flags() == (True, True)


@pytest.fixture
def _cublas() -> Iterator[None]:
    """This device as one whose matmuls cuBLAS runs."""
    with mock.patch.object(runtime, "uses_cublas", return_value=True):
        yield


def _head(vocab: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(vocab, 16, dtype=dtype)


@pytest.mark.usefixtures("_cublas")
def test_the_flag_of_the_dtype_is_off_within_and_as_before_after() -> None:
    with fp32_reductions(_head(13)):
        assert _flags() == (False, True)
        with fp32_reductions(_head(13, torch.float16)), fp32_reductions(_head(11)):
            assert _flags() == (False, False)
        assert _flags() == (False, True)
    with pytest.raises(KeyError), fp32_reductions(_head(13)):
        raise KeyError


@pytest.mark.usefixtures("_cublas")
@pytest.mark.parametrize("head", [_head(16), _head(13, torch.float32), _head(13, torch.float64)])
def test_it_does_nothing_for_a_multiple_of_8_and_wide_dtypes(head: torch.Tensor) -> None:
    with fp32_reductions(head):
        assert _flags() == (True, True)


def test_it_does_nothing_without_cublas() -> None:
    with fp32_reductions(_head(13)):
        assert _flags() == (True, True)
    on_rocm = mock.Mock(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(13, 16))
    with mock.patch.object(torch.version, "hip", "6.4"), fp32_reductions(on_rocm):
        assert _flags() == (True, True)
    on_nvidia = mock.Mock(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(13, 16))
    with mock.patch.object(torch.version, "hip", None), fp32_reductions(on_nvidia):
        assert _flags() == (False, True)


@pytest.mark.usefixtures("_cublas")
@pytest.mark.parametrize("setting", [(False, True), (False, False)])
def test_a_flag_that_is_off_keeps_what_it_says_of_splitting(setting: tuple[bool, bool]) -> None:
    setattr(MATMUL, BF16, setting)
    try:
        with fp32_reductions(_head(13)):
            assert torch._C._get_cublas_allow_bf16_reduced_precision_reduction() == setting
        assert torch._C._get_cublas_allow_bf16_reduced_precision_reduction() == setting
    finally:
        setattr(MATMUL, BF16, True)


@pytest.mark.usefixtures("_cublas")
def test_the_last_of_several_threads_puts_the_flag_back() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with fp32_reductions(_head(13)):
            entered.set()
            leave.wait(10.0)

    thread = threading.Thread(target=other)
    with fp32_reductions(_head(13)):
        thread.start()
        assert entered.wait(10.0)
    assert _flags() == (False, True)
    leave.set()
    thread.join()
    assert _flags() == (True, True)


def _cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    result = linear_cross_entropy(hidden, weight, target, logits_memory=2 * 512 * 2, **options)  # panels, or 2 tokens
    assert isinstance(result, torch.Tensor)
    return result


def _log_probs(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    result = linear_log_probs(hidden, weight, target, logits_memory=4 * 512 * 2, **options)
    assert isinstance(result, torch.Tensor)
    return result


def _divergence(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    result = linear_jsd(hidden, weight, hidden.detach(), weight.detach(), target)
    assert isinstance(result, torch.Tensor)
    return result


def _grouped(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    normalizer = torch.tensor(float(len(target)))
    return linear_grouped_loss(hidden, weight, target, lambda lp, *_: lp.sum(), 4, normalizer).loss


@pytest.mark.usefixtures("_cublas")
@pytest.mark.parametrize(
    "run",
    [
        _cross_entropy,
        lambda *inputs: _cross_entropy(*inputs, class_weights=torch.ones(501)),
        lambda *inputs: _cross_entropy(*inputs, reduction="none"),
        _log_probs,
        lambda *inputs: _log_probs(*inputs, retain_memory=0),
        _divergence,
        _grouped,
    ],
    ids=["panels", "chunks", "none", "log_probs", "recomputed", "divergence", "grouped"],
)
def test_every_matmul_of_a_head_runs_within(run: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(501, 16, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 501, (40,), generator=generator)
    seen = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def matmul(*arguments: Any, **options: Any) -> Any:
            seen.append(getattr(MATMUL, BF16))
            return function(*arguments, **options)

        return matmul

    with mock.patch.object(torch, "mm", recorded(torch.mm)), mock.patch.object(torch, "addmm", recorded(torch.addmm)):
        loss = run(hidden, weight, target).sum()
        assert seen
        assert not any(seen)
        loss.backward()
    assert not any(seen)
