"""When memory that trials and captures have left is given back, which waits for the device; without one here."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from liger_trainer.graphs import capture
from liger_trainer.graphs.capture import CudaCaptures


@pytest.fixture
def captures(monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda: None)
    given_back = []
    for name, value in {
        "current_stream": lambda device: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": lambda enable_timing: event,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "reset_peak_memory_stats": lambda device: None,
        "empty_cache": lambda: given_back.append(True),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(capture, "remember_peak", lambda device: None)
    found = CudaCaptures.__new__(CudaCaptures)
    found.device, found._stream, found.taken, found.reserved, found._is_settled = (
        torch.device("cuda"),
        stream,
        7,
        0,
        True,
    )
    return found, given_back


def test_a_trial_is_settled_once(captures):
    found, given_back = captures
    with found.tried():
        pass
    found.settle()
    assert (len(given_back), found.reserved) == (1, 7)
    found.settle()
    assert len(given_back) == 1


def test_layers_that_run_beside_their_graphs_make_no_step_wait(captures):
    """A layer may do so in every step, such as one of whose results some steps use and others do not."""
    found, given_back = captures
    for _ in range(3):
        with found.beside():
            pass
        found.settle()
    assert given_back == []


def test_captures_have_the_memory_that_torch_has_cached(captures, monkeypatch):
    """In a capture it cannot be given back, so that is done before the first one of a step."""
    found, given_back = captures
    graph = SimpleNamespace(capture_begin=lambda **options: None, capture_end=lambda: None, replay=None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    found._has_room, found._pools = False, dict.fromkeys((False, True), (None, graph))
    for step in range(2):
        for keeps in (False, True):
            found(lambda: None, keeps)
            assert len(given_back) == 2 * step + 1
        found.settle()
        assert len(given_back) == 2 * step + 2
