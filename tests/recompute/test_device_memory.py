"""What an accelerator has left, on a device that is made up."""

import types

import pytest
import torch

from liger_trainer.recompute import budget
from liger_trainer.recompute.budget import DeviceMemory

GIB = 2**30


class Device:
    """The functions of `torch.cuda`, for 80 GiB of which others take 2."""

    def __init__(self, allocated, reserved):
        self.allocated, self.reserved, self.retries = allocated * GIB, reserved * GIB, 0

    def mem_get_info(self, device):
        return 78 * GIB - self.reserved, 80 * GIB

    def memory_stats(self, device):
        peaks = {"allocated_bytes.all.peak": self.allocated, "reserved_bytes.all.peak": self.reserved}
        return peaks | {"reserved_bytes.all.current": self.reserved, "num_alloc_retries": self.retries}

    def max_memory_allocated(self, device):
        return self.allocated

    def reset_peak_memory_stats(self, device):
        self.allocated = 0


def memory_of(monkeypatch, device):
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(budget, "remember_peak", lambda _: None)
    return DeviceMemory(types.SimpleNamespace(type="cuda", index=0))


@pytest.mark.parametrize(("allocated", "reserved", "limit"), [
    (37, 48, 80 - 2 - 1.6 - 11),
    (10, 21, 80 - 2 - 1.6 - 11),  # as many GiB beside less: what is kept later brings no more of them
    (37, 37, (80 - 2 - 1.6) / 1.03),
], ids=str)  # fmt: skip
def test_the_limit_leaves_room_for_others_fragments_and_a_margin(allocated, reserved, limit, monkeypatch):
    memory = memory_of(monkeypatch, Device(allocated, reserved))
    assert memory.limit() / GIB == pytest.approx(limit)
    assert memory.take_peak() == allocated * GIB
    assert memory.limit() / GIB == pytest.approx(limit)  # the peak from before the counter was reset


def test_a_process_that_may_have_a_share_keeps_within_it(monkeypatch):
    device = Device(allocated=37, reserved=37)
    device.get_per_process_memory_fraction = lambda _: 0.5
    assert memory_of(monkeypatch, device).limit() / GIB == pytest.approx((40 - 1.6) / 1.03)


def test_who_resets_the_counter_after_a_step_leaves_no_fragments_behind(monkeypatch):
    device = Device(allocated=70, reserved=72)
    memory = memory_of(monkeypatch, device)
    memory.note_peak()  # the end of a step
    limit = memory.limit()
    device.reset_peak_memory_stats(None)  # as a callback does that measures later steps
    assert memory.limit() == limit
    assert limit / GIB == pytest.approx((80 - 2 - 1.6) / 1.03)


def test_it_ran_out_once(monkeypatch):
    device = Device(10, 20)
    memory = memory_of(monkeypatch, device)
    assert not memory.ran_out()
    device.retries = 3
    assert memory.ran_out()
    assert not memory.ran_out()
    device.retries = 4
    memory.limit()  # which counts what the allocator reserved until now
    assert not memory.ran_out()
