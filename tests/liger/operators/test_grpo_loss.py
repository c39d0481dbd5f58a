"""Policy losses: the same arithmetic per token in Python, gradients in float64, kernels, and large batches on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from liger_trainer.configs.loss_types import POLICY_LOSS_TYPES
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs
from liger_trainer.liger.operators.grpo_loss import grpo_loss, grpo_loss_from_log_probs

BATCH, LENGTH, VOCAB = 4, 6, 11

LENGTHS = (6, 3, 1, 0)


def _case(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(BATCH, LENGTH + 1, VOCAB, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    log_probs = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    noise = torch.randn(3, BATCH, LENGTH, generator=generator, dtype=torch.float64)
    return {
        "logits": logits.to(dtype).requires_grad_(),
        "completion_ids": ids,
        "advantages": torch.tensor([1.3, -0.7, 0.4, 2.0]).to(dtype),
        "completion_mask": (torch.arange(LENGTH) < torch.tensor(LENGTHS).unsqueeze(-1)).long(),
        "old_log_probs": (log_probs + 0.3 * noise[0]).to(dtype),
        "ref_log_probs": (log_probs + 0.5 * noise[1]).to(dtype),
        "sampling_ratio": (0.2 * noise[2]).exp().to(dtype),
    }


def _by_hand(case: dict[str, torch.Tensor], **options: Any) -> tuple[list[list[float]], list[list[float]], float]:
    """Losses and KLs of the valid tokens, and the reduced loss."""
    low, high, delta = options.get("epsilon_low", 0.2), options.get("epsilon_high", 0.2), options.get("delta")
    kind, beta = options["loss_type"], options.get("beta", 0.0)
    losses: list[list[float]] = []
    kls: list[list[float]] = []
    for b, length in enumerate(LENGTHS):
        advantage = case["advantages"][b].item()
        row = []
        for t in range(length):
            z = [value / 0.9 for value in case["logits"][b, t].tolist()]
            row.append(z[case["completion_ids"][b, t]] - math.log(sum(math.exp(value) for value in z)))
        olds = case["old_log_probs"][b].tolist() if "old_log_probs" in case else row
        ratios = [math.exp(row[t] - olds[t]) for t in range(length)]
        if options.get("importance_sampling_level") == "sequence":
            ratios = [math.exp(sum(row[t] - olds[t] for t in range(length)) / max(length, 1))] * length
        sampling = case["sampling_ratio"][b].tolist() if "sampling_ratio" in case else [1.0] * LENGTH
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        log_w = sum(row[t] - olds[t] + math.log(sampling[t]) for t in range(length))
        phi = math.exp(rate + k * log_w - rate * math.exp(log_w))
        losses.append([])
        kls.append([])
        for t, w in enumerate(ratios):
            if kind == "cispo":
                loss = -min(w, high) * advantage * row[t]
            elif kind == "sapo":
                temperature = 1.0 if advantage > 0 else 1.05
                loss = -4.0 / temperature / (1.0 + math.exp(-temperature * (w - 1.0))) * advantage
            elif kind == "vespo":
                loss = -phi * advantage * row[t]
            else:
                free = w if delta is None else min(w, delta)
                loss = -min(free * advantage, min(max(w, 1 - low), 1 + high) * advantage)
            if kind != "vespo":
                loss *= sampling[t]
            apart = case["ref_log_probs"][b, t].item() - row[t]
            kls[-1].append((math.exp(apart) - apart - 1.0) * (w if options.get("use_bias_correction_kl") else 1.0))
            losses[-1].append(loss + beta * kls[-1][-1])
    total, tokens = sum(map(sum, losses)), sum(LENGTHS)
    if kind in ("grpo", "sapo"):
        reduced = sum(sum(row) / max(len(row), 1) for row in losses) / BATCH
    elif kind == "luspo":
        reduced = total / BATCH
    elif kind == "dr_grpo":
        reduced = total / BATCH / options.get("max_completion_length", LENGTH)
    elif kind == "bnpo":
        reduced = total / tokens
    else:
        reduced = total / options.get("num_items", tokens)
    return losses, kls, reduced


OPTIONS: list[dict[str, Any]] = [
    *({"loss_type": kind} for kind in POLICY_LOSS_TYPES),
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "beta": 0.1},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "delta": 1.1, "epsilon_high": 0.4, "beta": 0.04, "num_items": 40},
    {"loss_type": "bnpo", "beta": 0.04, "use_bias_correction_kl": True},
    {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
    {"loss_type": "dr_grpo", "max_completion_length": 50},
    {"loss_type": "cispo", "epsilon_high": 1.2, "num_items": 17},
]


@pytest.mark.parametrize("drop", [(), ("old_log_probs",), ("sampling_ratio",)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_losses_are_those_computed_by_hand(options: dict[str, Any], drop: tuple[str, ...]) -> None:
    case = {name: value for name, value in _case().items() if name not in drop}
    losses, kls, reduced = _by_hand(case, **options)
    result = grpo_loss(**case, temperature=0.9, **options)
    assert result.loss.item() == pytest.approx(reduced)
    each = grpo_loss(**case, temperature=0.9, reduction="none", **options)
    for b, length in enumerate(LENGTHS):
        assert each.loss[b, :length].tolist() == pytest.approx(losses[b])
        assert not each.loss[b, length:].any()
        if options.get("beta"):
            assert each.kl[b, :length].tolist() == pytest.approx(kls[b])
    assert (result.kl is None) == ("beta" not in options)
    if result.kl is not None:
        assert result.kl.item() == pytest.approx(sum(map(sum, kls)) / sum(LENGTHS))
    assert result.clipped.item() == pytest.approx(each.clipped.sum().item() / sum(LENGTHS))


WITH_GRADIENT = [options for options in OPTIONS if options["loss_type"] not in ("cispo", "vespo")]  # which detach


@pytest.mark.parametrize("options", WITH_GRADIENT, ids=lambda options: "-".join(map(str, options.values())))
def test_gradcheck(options: dict[str, Any]) -> None:
    case = _case()
    logits = case.pop("logits")
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, **case, temperature=0.9, **options).loss, logits)


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_detached_weights_leave_the_gradient_of_the_log_probability(loss_type: str) -> None:
    case = _case()
    result = grpo_loss(**case, temperature=0.9, loss_type=loss_type, reduction="none")
    weights = (result.loss / result.log_probs).detach().nan_to_num()
    log_probs = (case["logits"][:, :-1] / 0.9).log_softmax(-1).gather(-1, case["completion_ids"].unsqueeze(-1))
    expected = (log_probs.squeeze(-1) * weights * case["completion_mask"]).sum()
    (gradient,) = torch.autograd.grad(result.loss.sum(), case["logits"])
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, case["logits"])[0])


@pytest.mark.parametrize("loss_type", POLICY_LOSS_TYPES)
def test_masked_tokens_may_hold_anything(loss_type: str) -> None:
    case = _case(torch.float32)
    options = {"loss_type": loss_type, "beta": 0.1, "temperature": 0.9}
    clean = grpo_loss(**case, **options).loss
    hidden = case["completion_mask"] == 0
    poisoned = dict(case)
    for name in ("old_log_probs", "ref_log_probs", "sampling_ratio"):
        poisoned[name] = case[name].masked_fill(hidden, float("nan"))
    poisoned["logits"] = case["logits"].detach().clone()
    poisoned["logits"][:, :-1][hidden] = float("inf")
    poisoned["logits"].requires_grad_()
    result = grpo_loss(**poisoned, **options).loss
    torch.testing.assert_close(result, clean)
    torch.testing.assert_close(
        torch.autograd.grad(result, poisoned["logits"])[0], torch.autograd.grad(clean, case["logits"])[0]
    )


def test_loss_is_fp32_and_the_logits_stay() -> None:
    case = _case()
    case["logits"] = case["logits"].detach().bfloat16().requires_grad_()
    before = case["logits"].detach().clone()
    result = grpo_loss(**case, temperature=0.9)
    result.loss.backward()
    assert result.log_probs.dtype == torch.float32
    assert case["logits"].detach().equal(before)
    assert case["logits"].grad.dtype == torch.bfloat16
    assert not case["logits"].grad[:, -1].any()


def test_logits_of_the_completion_alone_give_the_same() -> None:
    case = _case()
    whole = grpo_loss(**case, temperature=0.9).loss
    case["logits"] = case["logits"][:, :-1]
    torch.testing.assert_close(grpo_loss(**case, temperature=0.9).loss, whole)


def test_through_the_head_it_is_the_same_loss() -> None:
    case = _case()
    logits = case.pop("logits")
    hidden, weight = logits.detach()[:, :-1].clone().requires_grad_(), torch.eye(VOCAB, dtype=torch.float64)
    labels = torch.where(case["completion_mask"] != 0, case.pop("completion_ids"), -100)
    log_probs = linear_log_probs(hidden, weight, labels, temperature=0.9)
    loss = grpo_loss_from_log_probs(log_probs, **case, beta=0.1).loss
    expected = grpo_loss(logits, torch.where(labels < 0, 0, labels), **case, temperature=0.9, beta=0.1).loss
    torch.testing.assert_close(loss, expected)
    (gradient,), (exact,) = torch.autograd.grad(loss, hidden), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, exact[:, :-1])


def test_num_items_as_a_tensor_and_sequence_ratios_of_both_shapes() -> None:
    case = _case()
    case["sampling_ratio"] = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=torch.float64)
    one = grpo_loss(**case, num_items=9).loss
    case["sampling_ratio"] = case["sampling_ratio"].unsqueeze(-1)
    torch.testing.assert_close(grpo_loss(**case, num_items=torch.tensor(9)).loss, one)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_compiles_to_one_graph(loss_type: str) -> None:
    case = _case(torch.float32)
    logits = case.pop("logits")
    torch._dynamo.reset()

    def step(logits: torch.Tensor) -> torch.Tensor:
        return grpo_loss(logits * 2.0, **case, beta=0.1, loss_type=loss_type).loss

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(logits), step(logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "ppo"}, ["`loss_type`", "'ppo'", "'dapo'"]),
        ({"importance_sampling_level": "batch"}, ["`importance_sampling_level`", "'batch'"]),
        ({"reduction": "sum"}, ["`reduction`", "'sum'"]),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, ["'cispo'", "'token'"]),
        ({"loss_type": "sapo", "delta": 2.0}, ["'sapo'", "`delta`"]),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, ["temperatures", "above 0"]),
        ({"beta": 0.1, "ref_log_probs": None}, ["`beta`", "`ref_log_probs`"]),
        ({"logits": torch.zeros(BATCH, LENGTH + 2, VOCAB)}, ["`logits`", "8 positions", "6 or 7"]),
        ({"logits": torch.zeros(BATCH, VOCAB)}, ["`logits`", "(B, L, V)"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        grpo_loss(**{**_case(), **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def _kernel_case(device: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(3, 5, 200, generator=generator)
    tensors = {
        "completion_ids": torch.randint(0, 200, (3, 4), generator=generator),
        "advantages": torch.tensor([1.0, -0.5, 0.3]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
        "ref_log_probs": -torch.rand(3, 4, generator=generator) - 5.0,
    }
    return {"logits": logits.to(dtype).to(device), **{name: value.to(device) for name, value in tensors.items()}}


@pytest.mark.kernel
@pytest.mark.parametrize("loss_type", POLICY_LOSS_TYPES)
def test_against_float64(device: str, loss_type: str) -> None:
    case = _kernel_case(device, torch.float32)
    logits = case.pop("logits").requires_grad_()
    double = logits.detach().double().requires_grad_()
    options = {"loss_type": loss_type, "beta": 0.1, "temperature": 0.7}
    ours, exact = grpo_loss(logits, **case, **options), grpo_loss(double, **case, **options)
    torch.testing.assert_close(ours.loss.double(), exact.loss, atol=1e-5, rtol=1e-5)
    (gradient,), (truth,) = torch.autograd.grad(ours.loss, logits), torch.autograd.grad(exact.loss, double)
    torch.testing.assert_close(gradient.double(), truth, atol=1e-6, rtol=1e-4)


@pytest.mark.kernel
def test_inplace_backward_writes_over_the_logits_and_no_other_does(device: str) -> None:
    case = _kernel_case(device, torch.bfloat16)
    leaf = case.pop("logits").requires_grad_()
    gradients = []
    for inplace in (False, True):
        logits = leaf * 1.0
        before = logits.detach().clone()
        grpo_loss(logits, **case, beta=0.1, inplace_backward=inplace).loss.backward()
        assert logits.detach().equal(before) != inplace
        gradients.append(leaf.grad.clone())
        leaf.grad = None
    assert gradients[0].equal(gradients[1])


MIB = 2**20


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _gpu_case(batch: int, length: int, vocab: int) -> tuple[torch.Tensor, ...]:
    logits = torch.randn(batch, length + 1, vocab, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, vocab, (batch, length), device="cuda")
    mask = (torch.arange(length, device="cuda") < torch.linspace(1, length, batch, device="cuda").unsqueeze(-1)).long()
    return logits.requires_grad_(), ids, torch.randn(batch, device="cuda"), mask


@pytest.mark.gpu
@pytest.mark.parametrize("loss_type", POLICY_LOSS_TYPES)
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_synchronises(loss_type: str) -> None:
    logits, ids, advantages, mask = _gpu_case(4, 16, 1000)
    other = -torch.rand(4, 16, device="cuda")

    def step() -> None:
        grpo_loss(logits, ids, advantages, mask, other, other, beta=0.1, loss_type=loss_type).loss.backward()

    step()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


@pytest.mark.gpu
def test_inplace_backward_allocates_no_second_logits() -> None:
    leaf, ids, advantages, mask = _gpu_case(4, 511, 128256)
    size = 2 * leaf.numel()
    for inplace, allowed in ((False, 1), (True, 0)):
        logits = leaf * 1.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = grpo_loss(logits, ids, advantages, mask, inplace_backward=inplace).loss
        torch.autograd.grad(loss, logits)
        assert torch.cuda.max_memory_allocated() - before <= allowed * size + 2 * MIB
        del logits, loss


@pytest.mark.gpu
def test_more_rows_than_a_grid_axis_holds() -> None:
    logits, ids, advantages, _ = _gpu_case(2, 70000, 64)
    result = grpo_loss(logits, ids, advantages)
    exact = grpo_loss(logits.detach().double().requires_grad_(), ids, advantages)
    torch.testing.assert_close(result.log_probs.double(), exact.log_probs, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert gradient[:, -2].any()
    assert not gradient[:, -1].any()
