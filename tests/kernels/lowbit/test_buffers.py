"""The memory of decoded weights: one of the largest, by slot; what lies in it is reused in a backward, never stale."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.lowbit import buffers
from liger_trainer.kernels.lowbit.buffers import filled
from liger_trainer.kernels.lowbit.decode import decode, decoded
from tests.packed_weights import packed


@pytest.fixture(autouse=True)
def _free():
    buffers.free_buffers()


class Recorder:
    """Products with decoded weights; `written` has a name for each time that a weight was decoded."""

    def __init__(self):
        self.written = []

    def dense(self, name, source, slot=0):
        """Twice the source, as a buffer holds it."""

        def write(out):
            self.written.append(name)
            torch.mul(source, 2, out=out)

        with filled(source.shape, source.dtype, source.device, write, [source], slot) as dense:
            return dense.clone()

    def product(self, x, name, source, slot=0):
        """``x @ (2 source)``, which is decoded forward and backward."""
        return Product.apply(x, self, name, source, slot)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, recorder, name, source, slot):
        ctx.given = recorder, name, source, slot
        return x @ recorder.dense(name, source, slot)

    @staticmethod
    def backward(ctx, dy):
        recorder, name, source, slot = ctx.given
        return dy @ recorder.dense(name, source, slot).T, None, None, None, None


def x_and_weights(count=2):
    return torch.randn(3, 4, requires_grad=True), [torch.randn(4, 4) for _ in range(count)]


def test_a_checkpointed_block_decodes_a_weight_once_in_its_backward():
    recorder, (x, (first, second)) = Recorder(), x_and_weights()

    def block(x):
        return recorder.product(recorder.product(x, "first", first, 0).tanh(), "second", second, 1).sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert recorder.written == ["first", "second"] * 2
    expected = torch.autograd.grad((((x @ (2 * first)).tanh()) @ (2 * second)).sin().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_weights_of_one_slot_take_turns():
    recorder, (x, (first, second)) = Recorder(), x_and_weights()

    def block(x):
        return recorder.product(recorder.product(x, "first", first).tanh(), "second", second).sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert recorder.written == ["first", "second", "first", "second", "first"]
    expected = torch.autograd.grad((((x @ (2 * first)).tanh()) @ (2 * second)).sin().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_nothing_is_reused_in_the_next_backward_or_outside_of_one():
    recorder, (x, (weight, _)) = Recorder(), x_and_weights()
    y = recorder.product(x, "weight", weight)
    recorder.product(x, "weight", weight)
    for _ in range(2):
        weight.data.copy_(torch.randn(4, 4))  # which torch does not count as a change
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(dx, torch.ones(3, 4) @ (2 * weight).T)
    assert recorder.written == ["weight"] * 4


class InBackward(torch.autograd.Function):
    """Calls a function in the backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.function()
        return dy, None


def in_one_backward(function):
    InBackward.apply(torch.zeros(1, requires_grad=True), function).backward()


def test_a_changed_weight_is_decoded_again():
    recorder, weight = Recorder(), torch.randn(4, 4)

    def work():
        assert torch.equal(recorder.dense("old", weight), 2 * weight)
        assert torch.equal(recorder.dense("same", weight), 2 * weight)
        weight.add_(1)
        assert torch.equal(recorder.dense("new", weight), 2 * weight)

    in_one_backward(work)
    assert recorder.written == ["old", "new"]


def test_parts_of_a_stack_are_told_apart():
    recorder, stack = Recorder(), torch.randn(6, 4, 4)

    def work():
        for part in (stack[:3], stack[3:], stack[3:], stack[:3], stack[:2]):
            assert torch.equal(recorder.dense("part", part), 2 * part)

    in_one_backward(work)
    assert len(recorder.written) == 4


def test_memory_that_another_weight_could_take_is_held():
    """Weights that are moved to the accelerator for a layer and freed after it may come to lie where another lay."""
    recorder = Recorder()

    def work():
        for value in range(20):
            weight = torch.full((64, 64), float(value))
            assert torch.equal(recorder.dense(value, weight), 2 * weight)
            del weight

    in_one_backward(work)
    assert recorder.written == [*range(20)]


def test_memory_that_a_held_weight_has_given_back():
    """FSDP2 frees the storage of a layer's weights, and gathers the next layer's: there, and with the same version."""
    recorder, places = Recorder(), []

    def work():
        held = []
        for value in range(20):
            weight = torch.full((64, 64), float(value))
            places.append(weight.data_ptr())
            assert torch.equal(recorder.dense(value, weight), 2 * weight)
            held.append(weight)
            weight.untyped_storage().resize_(0)

    in_one_backward(work)
    assert len(set(places)) < 20
    assert recorder.written == [*range(20)]


def test_what_could_not_be_written_is_not_reused():
    source = torch.randn(4, 4)

    def fail(out):
        out.zero_()
        raise RuntimeError("out of memory")

    def work():
        given = (source.shape, source.dtype, source.device)
        with filled(*given, lambda out: out.copy_(source), [source]):
            pass
        with pytest.raises(RuntimeError, match="out of memory"), filled(*given, fail, [source + 1]):
            pass
        with filled(*given, lambda out: out.copy_(source), [source]) as dense:
            assert torch.equal(dense, source)

    in_one_backward(work)


def test_weights_made_in_inference_mode_have_no_version():
    recorder = Recorder()
    with torch.inference_mode():
        weight = torch.randn(4, 4)
    in_one_backward(lambda: [recorder.dense("weight", weight) for _ in range(2)])
    assert recorder.written == ["weight"] * 2


def test_without_torch_s_number_of_the_backward_nothing_is_reused(monkeypatch):
    monkeypatch.setattr(buffers, "available", lambda feature: False)
    recorder, weight = Recorder(), torch.randn(4, 4)
    in_one_backward(lambda: [recorder.dense("weight", weight) for _ in range(2)])
    assert recorder.written == ["weight"] * 2


def test_one_buffer_of_the_largest_weight_for_each_slot_and_dtype():
    large, small = packed("mxfp4", 3, 8, 64), packed("fp8, blocks", 8, 64)
    for weight in (small, large, small):
        with decoded(weight, torch.bfloat16) as dense:
            assert torch.equal(dense, decode(weight))
    (buffer,) = buffers._buffers.values()
    assert buffer.memory.numel() == 3 * 8 * 64
    with decoded(small, torch.bfloat16, slot=1), decoded(small, torch.float32):
        pass
    assert {key[1:] for key in buffers._buffers} == {
        (torch.bfloat16, None, 0),
        (torch.bfloat16, None, 1),
        (torch.float32, None, 0),
    }
    buffers.free_buffers()
    assert not buffers._buffers


def test_two_threads_take_turns():
    weights = [packed("mxfp4", 64, 64) for _ in range(4)]
    expected, wrong = [decode(weight) for weight in weights], []

    def work(weight, right):
        for _ in range(50):
            with decoded(weight, torch.bfloat16) as dense:
                wrong.extend([] if torch.equal(dense, right) else [1])

    threads = [threading.Thread(target=work, args=pair) for pair in zip(weights, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
