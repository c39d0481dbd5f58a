"""The fused loss expects exactly the gradient that arrives, so that no pass rescales its gradients."""

import pytest
import torch

from liger_trainer.kernels.head import linear_cross_entropy, linear_log_probs
from tests.trainers.builders import causal, sft


@pytest.fixture
def expected_and_received(monkeypatch):
    pairs = []
    for module in (linear_log_probs, linear_cross_entropy):  # log-probabilities, and a loss

        def spy(gradients, upstream, expected, function, original=module.rescaled_gradients):
            pairs.append((expected.clone(), upstream.clone()))
            return original(gradients, upstream, expected, function)

        monkeypatch.setattr(module, "rescaled_gradients", spy)
    return pairs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaled", [False, True])  # by the gradient scaler of fp16
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("build", [causal, sft])
def test_trainer(build, accumulation, smoothing, scaled, expected_and_received, tmp_path):
    trainer = build(tmp_path, gradient_accumulation_steps=accumulation, label_smoothing_factor=smoothing)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu") if scaled else None  # accelerate has one on GPUs
    expected_and_received.clear()  # of the probes
    trainer.train()
    assert len(expected_and_received) == 3 * accumulation
    assert all(expected.item() == received.item() for expected, received in expected_and_received)
