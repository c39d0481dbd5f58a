"""Counting the calls of our functions, and of the operator of LoRA layers."""

import pytest

from liger_trainer.kernels.lora import lora


@pytest.fixture
def calls_of(monkeypatch):
    """``calls_of(module, *names)`` is a list that grows by the name of each of these functions that runs."""

    def calls_of(module, *names):
        seen = []
        for name in names:
            original = getattr(module, name)

            def run(*args, name=name, original=original, **kwargs):
                seen.append(name)
                return original(*args, **kwargs)

            monkeypatch.setattr(module, name, run)
        return seen

    return calls_of


@pytest.fixture
def fused(monkeypatch):
    """How many layers each call of the LoRA operator had, but for the calls of the probe."""
    calls, native = [], lora._lora_linears

    def counting(x, weights, *rest):
        if x.shape[:-1] != (4, 16):
            calls.append(len(weights))
        return native(x, weights, *rest)

    monkeypatch.setattr(lora, "_lora_linears", counting)
    return calls
