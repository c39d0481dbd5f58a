"""Managers of continuous batching that are dropped, fail, go on, start again or share a model: whose attention runs."""

import contextlib
import logging
import threading
import time

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.attention.config_names import AWAY, NAME
from liger_trainer.head import warn_once
from tests.tiny_models import TINY_MODELS

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]
TOKENS = 12


def patched():
    model = TINY_MODELS["llama"]().eval()
    apply_liger_kernel(model)
    assert named(model) == NAME
    return model


def named(model):
    return str(model.config._attn_implementation)


def manager_of(model):
    return model.init_continuous_batching(
        GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1),
        ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64),
    )


def answers(manager):
    """What a manager that is started answers to the prompts."""
    return collected(manager, manager.add_requests(PROMPTS, max_new_tokens=TOKENS))


def collected(manager, ids):
    found = {}
    while len(found) < len(ids):
        result = manager.get_result(timeout=10)
        assert result is not None
        if result.is_finished():
            assert result.error is None
            found[result.request_id] = result.generated_tokens
    return [found[each] for each in ids]


@pytest.fixture(scope="module")
def expected():
    manager = manager_of(TINY_MODELS["llama"]().eval())
    manager.start()
    try:
        return answers(manager)
    finally:
        manager.stop()


def comes_back(model):
    deadline = time.monotonic() + 20
    while named(model) != NAME and time.monotonic() < deadline:
        time.sleep(0.01)
    return named(model) == NAME


def test_a_manager_that_is_dropped():
    model = patched()
    manager = manager_of(model)
    assert named(model) == "sdpa"
    del manager
    assert named(model) == NAME
    assert not AWAY


def test_a_manager_that_cannot_be_made(monkeypatch):
    model = patched()
    monkeypatch.setattr(type(model), "_get_logits_processor", lambda self, config: [][0])
    with pytest.raises(IndexError):
        manager_of(model)
    assert named(model) == NAME


def test_a_manager_that_is_stopped_before_it_is_started():
    model = patched()
    manager_of(model).stop()
    assert named(model) == NAME


def test_a_manager_that_starts_again(expected):
    model = patched()
    manager = manager_of(model)
    for _ in range(2):
        manager.start()
        assert named(model) == "sdpa"
        assert answers(manager) == expected
        manager.stop()
        assert named(model) == NAME


@contextlib.contextmanager
def paused(manager):
    """Pauses the thread of a manager, in another thread than this one, which may stop it meanwhile."""
    holds, ends = threading.Event(), threading.Event()

    def pause():
        with manager.pause():
            holds.set()
            ends.wait()

    holder = threading.Thread(target=pause)
    holder.start()
    assert holds.wait(20)
    try:
        yield
    finally:
        ends.set()
        holder.join()


can_pause = pytest.mark.skipif(not hasattr(ContinuousBatchingManager, "pause"), reason="managers cannot be paused")


@can_pause
@pytest.mark.parametrize("waits", [{"block": False}, {"timeout": 0.01}])
def test_a_manager_that_is_not_waited_for(waits, expected):
    model = patched()
    manager = manager_of(model)
    manager.start()
    with paused(manager):
        ids = manager.add_requests(PROMPTS, max_new_tokens=TOKENS)
        manager.stop(**waits, keep_for_next_session=True)
        assert named(model) == "sdpa"
    assert collected(manager, ids) == expected
    assert comes_back(model)
    model.destroy_cached_continuous_batching_manager()
    assert named(model) == NAME


@can_pause
def test_a_manager_that_refuses_to_stop(expected):
    model = patched()
    manager = manager_of(model)
    manager.start()
    with manager.pause():
        with pytest.raises(RuntimeError, match="inside a pause"):
            manager.stop()
        assert named(model) == "sdpa"
    assert answers(manager) == expected
    manager.stop()
    assert named(model) == NAME


def test_two_managers_of_a_model(expected):
    model = patched()
    one, other = manager_of(model), manager_of(model)
    one.start()
    other.start()
    one.stop()
    assert named(model) == "sdpa"
    assert answers(other) == expected
    other.stop()
    assert named(model) == NAME


@pytest.mark.parametrize("change", ["patched", "patched again", "reverted"])
def test_a_model_that_is_patched_or_reverted_meanwhile(change, expected):
    model = TINY_MODELS["llama"]().eval()
    if change != "patched":
        apply_liger_kernel(model)
    manager = manager_of(model)
    manager.start()
    if change == "reverted":
        revert_liger_kernel(model)
    else:
        report = apply_liger_kernel(model)
        assert "attention" in {row.component for row in report.applied}
    assert named(model) == "sdpa"
    assert answers(manager) == expected
    manager.stop()
    assert named(model) == ("sdpa" if change == "reverted" else NAME)


def test_training_beside_a_manager_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_said", set())
    model = patched()
    manager = manager_of(model)
    model.train()
    ids = torch.arange(6)[None]
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
    (record,) = caplog.records
    assert record.getMessage().startswith("LlamaForCausalLM is trained while a manager of continuous batching has its")
    manager.stop()
    caplog.clear()
    monkeypatch.setattr(warn_once, "_said", set())
    model(ids, labels=ids).loss.backward()
    assert not caplog.records
