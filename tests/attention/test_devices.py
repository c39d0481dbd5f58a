"""Where our attention has no kernels, masks are the model's own."""

import pytest
import torch

from liger_trainer.attention import interface
from liger_trainer.kernels.runtime import INTERPRETED, TRITON_DEVICES
from tests.attention.test_masks import CREATE, MASKS, create


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter runs the kernels on the CPU")
@pytest.mark.parametrize("kind", CREATE)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_cpu_has_transformers_own(kind, mask, monkeypatch):
    monkeypatch.setattr(interface, "TRITON_DEVICES", TRITON_DEVICES)
    ours, own = (create(kind, attention, attention_mask=mask) for attention in ("liger_trainer", "sdpa"))
    assert type(ours) is type(own)
    assert own is None or torch.equal(ours, own)
