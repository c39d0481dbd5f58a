"""The distillation trainers on an accelerator: TRL's gradients, no logits of all tokens, no wait for the device."""

import pytest
import torch

from liger_trainer.head.divergence import divergence
from tests.device import no_host_sync, one_gpu, peak_memory
from tests.head.deferring import B, H, S, V, defer
from tests.trainers.test_parity_distillation import TRAINERS, build, capped, gradients, granite, masked_batch, student

pytestmark = [pytest.mark.gpu, one_gpu]


def on_device(batch):
    return {name: value.to("cuda") for name, value in batch.items()}


def other_capped():
    """The student's class with other weights: between equal models the gradient is rounding alone."""
    return capped(seed=9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("teacher", [student, other_capped, granite])
def test_gradients_are_those_of_trl(kind, beta, teacher, tmp_path):
    (stock_loss, stock), (loss, ours) = (
        gradients(
            build(kind, liger, tmp_path, beta=beta, model=capped, teacher=teacher, use_cpu=False),
            on_device(masked_batch(kind)),
            torch.tensor(17, device="cuda"),
        )
        for liger in (False, True)
    )
    torch.testing.assert_close(loss, stock_loss, rtol=1e-3, atol=1e-4)
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        error = (ours[name] - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error < 5e-3, (name, float(error))


@pytest.mark.filterwarnings("ignore")
def test_peak_of_gkd_is_far_below_whole_logits(tmp_path):
    vocab, rows, length = 32768, 8, 256
    sizes = {"vocab_size": vocab, "hidden_size": 32, "max_position_embeddings": length}

    def peak(liger):
        more = {"liger": {"logits_memory": 2**24}, "use_cpu": False}
        trainer = build(
            "gkd", liger, tmp_path, model=lambda: student(**sizes), teacher=lambda: student(**sizes), **more
        )
        ids = torch.randint(3, vocab, (rows, length), device="cuda")
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        return peak_memory(lambda: gradients(trainer, dict(batch)))

    of_all_logits = rows * length * vocab * 4
    assert peak(True) < of_all_logits / 2
    assert peak(False) > 4 * of_all_logits


def test_the_divergence_does_not_wait_for_the_device():
    heads = [torch.nn.Linear(H, V, device="cuda") for _ in range(2)]
    hidden = torch.randn(B, S, H, device="cuda", requires_grad=True)
    labels = torch.zeros(B, S, dtype=torch.long, device="cuda")
    items = torch.tensor(7.0, device="cuda")

    def step():
        logits = [defer(head, hidden) for head in heads]
        divergence(*logits, labels, 0.5, 1.0, items).loss.backward()

    step()  # kernels are compiled here
    with no_host_sync():
        step()
