"""Experts whose weights are packed: against float64, in parts of a stack, what is saved and decoded, errors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.lowbit import buffers
from liger_trainer.kernels.lowbit import decode as decoding
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.kernels.moe import grouped_matmul, packed_rows
from liger_trainer.kernels.moe.experts import ExpertLoRA, moe_experts, moe_experts_reference
from tests.calls import recorded_calls, saved_tensors
from tests.packed_weights import FORMATS, on, packed

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE, RANK = 13, 2, 5, 64, 32, 3


@pytest.fixture(autouse=True)
def _free():
    buffers.free_buffers()


class Case:
    """A block of packed experts with adapters and biases, as GPT-OSS has them."""

    def __init__(self, name="mxfp4", dtype=torch.float64, device="cpu", rows="uneven", sizes=(HIDDEN, INTERMEDIATE)):
        def leaf(*shape):
            return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()

        hidden, intermediate = sizes
        self.hidden, self.top_k_weights = leaf(TOKENS, hidden), leaf(TOKENS, TOP_K)
        # The last expert has no rows, and one choice is no expert; or one expert has every row.
        self.index = torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)]).to(device)
        self.index[4, 1] = EXPERTS
        if rows == "one":
            self.index[:] = 2
        shapes = (EXPERTS, 2 * intermediate, hidden), (EXPERTS, hidden, intermediate)
        self.weights = [on(packed(name, *shape), device) for shape in shapes]
        self.biases = [leaf(*shape[:2]) for shape in shapes]
        self.factors = [(leaf(EXPERTS, RANK, inputs), leaf(EXPERTS, outputs, RANK)) for _, outputs, inputs in shapes]

    @property
    def leaves(self):
        return [self.hidden, self.top_k_weights, *self.biases, *(each for pair in self.factors for each in pair)]

    def block(self, hidden, function=moe_experts, weights=None):
        gate_up, down = ([ExpertLoRA(*pair, 0.5)] for pair in self.factors)
        return function(
            *(hidden, self.index, self.top_k_weights, *(weights or self.weights)),
            gate_up_bias=self.biases[0], down_bias=self.biases[1], gate_up_adapters=gate_up, down_adapters=down,
            interleaved=True, limit=7.0, up_offset=1.0,
        )  # fmt: skip

    def results(self, output):
        """The output, and the gradients of everything that has one."""
        upstream = torch.arange(output.numel(), device=output.device).cos().bfloat16().to(output.dtype)
        return [output.detach(), *torch.autograd.grad(output, self.leaves, upstream.view(output.shape))]

    def expected(self):
        """The same in float64, with the weights decoded in fp32."""
        wide = Case.__new__(Case)
        wide.index = self.index
        for name in ("hidden", "top_k_weights"):
            setattr(wide, name, getattr(self, name).detach().double().requires_grad_())
        wide.biases = [each.detach().double().requires_grad_() for each in self.biases]
        wide.factors = [tuple(each.detach().double().requires_grad_() for each in pair) for pair in self.factors]
        weights = [decode(weight, torch.float32).double() for weight in self.weights]
        return wide.results(wide.block(wide.hidden, moe_experts_reference, weights))


def assert_near(ours, expected, bound):
    for one, true in zip(ours, expected, strict=True):
        assert (one.double() - true).norm() <= bound * true.norm()


@pytest.fixture(params=["whole", "parts"])
def parts(request, monkeypatch):
    """A stack at once, or two experts at a time and one at last; for the reference too, which does not look."""
    if request.param == "parts":
        monkeypatch.setattr(packed_rows, "experts_at_a_time", lambda weight, dtype: 2)
        monkeypatch.setattr(grouped_matmul, "library_takes", lambda *operands: False)  # as with parts


@pytest.mark.parametrize("rows", ["uneven", "one"])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_gradients_against_float64(name, rows, parts):
    case = Case(name, rows=rows)
    assert_near(case.results(case.block(case.hidden)), case.expected(), 1e-12)


@pytest.mark.kernel
@pytest.mark.parametrize("rows", ["uneven", "one"])
@pytest.mark.parametrize("name", ["fp8, blocks", "mxfp4"])
def test_the_kernels_against_float64(name, rows, parts, device):
    case = Case(name, torch.float32, device, rows, (160, 96))
    assert_near(case.results(case.block(case.hidden)), case.expected(), 3e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["fp8, blocks", "int4, zeros"])
def test_the_bits_of_decoded_weights_in_half_precision(name, parts, device):
    case = Case(name, torch.bfloat16, device, sizes=(160, 96))
    dense = [decode(weight, torch.bfloat16) for weight in case.weights]
    expected = case.results(case.block(case.hidden, weights=dense))
    for one, other in zip(case.results(case.block(case.hidden)), expected, strict=True):
        assert torch.equal(one, other)


def test_parts_are_of_at_most_a_gibibyte():
    for experts, rows, columns, expected in ((32, 5760, 2880, 32), (128, 5760, 2880, 32), (2, 40000, 40000, 1)):
        weight = packed("fp8, one scale", 1, 2, 2)
        weight = weight._replace(codes=weight.codes[:, :1, :1].expand(experts, rows, columns))
        assert packed_rows.experts_at_a_time(weight, torch.bfloat16) == expected


def test_no_tokens_and_no_choices(parts):
    case = Case()
    case.index[:] = EXPERTS
    assert torch.equal(case.block(case.hidden), torch.zeros(TOKENS, HIDDEN).double())
    case.hidden, case.index, case.top_k_weights = case.hidden[:0], case.index[:0], case.top_k_weights[:0]
    assert case.block(case.hidden).shape == (0, HIDDEN)


@pytest.mark.parametrize("name", ["fp8, blocks", "mxfp4", "nvfp4, ModelOpt", "gptq"])
def test_autograd_keeps_nothing_of_the_weights(name):
    case = Case(name, torch.float32)
    with saved_tensors() as saved:
        case.block(case.hidden).sum()
    floating = {tensor.data_ptr(): tensor.nbytes for tensor in saved if tensor.is_floating_point()}
    pre = TOKENS * TOP_K * 2 * INTERMEDIATE * 4
    leaves = [leaf for leaf in case.leaves if leaf is not case.biases[0]]
    assert sum(floating.values()) == pre + sum(leaf.nbytes for leaf in leaves)
    model = {each.data_ptr() for weight in case.weights for each in (weight[0], *weight.statistics) if each.numel()}
    assert not model & {tensor.data_ptr() for tensor in saved}


def test_a_block_under_a_checkpoint_decodes_twice(monkeypatch):
    """Forward; and for recomputation and backward together, as the layers have slots of their own."""
    decodes = recorded_calls(monkeypatch, decoding, "_decode_")
    case = Case()
    output = checkpoint(case.block, case.hidden, use_reentrant=False)
    ours = case.results(output)
    assert len(decodes) == 4
    assert_near(ours, case.expected(), 1e-12)


def test_blocks_under_checkpoints_never_read_each_other_s_weights(parts):
    first, second = Case(), Case()
    output = checkpoint(second.block, checkpoint(first.block, first.hidden, use_reentrant=False), use_reentrant=False)
    leaves = [*first.leaves, *second.leaves[1:]]
    ours = torch.autograd.grad(output.sum(), leaves)
    dense = [[decode(weight, torch.float32).double() for weight in case.weights] for case in (first, second)]
    inner = first.block(first.hidden, moe_experts_reference, dense[0])
    expected = torch.autograd.grad(second.block(inner, moe_experts_reference, dense[1]).sum(), leaves)
    assert_near(ours, expected, 1e-12)


def test_autocast_decodes_in_its_dtype():
    case = Case("fp8, blocks", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = case.block(case.hidden)
    assert output.dtype == torch.bfloat16
    assert {key[1] for key in buffers._buffers} == {torch.bfloat16}
    assert_near([output], case.expected()[:1], 2e-2)


def test_a_stored_transpose(parts):
    case = Case()
    weights = [packed("mxfp4", EXPERTS, HIDDEN, 64), packed("mxfp4", EXPERTS, 32, HIDDEN)]
    given = case.hidden, case.index, case.top_k_weights
    expected = moe_experts_reference(*given, *(decode(each, torch.float64) for each in weights), transposed=True)
    torch.testing.assert_close(moe_experts(*given, *weights, transposed=True), expected)


def test_weights_that_do_not_fit_are_named():
    case = Case()
    given = case.hidden, case.index, case.top_k_weights
    with pytest.raises(ValueError, match=r"`gate_up_weight` is \(64, 64\); it must be \(experts, 2 \* intermediate"):
        moe_experts(*given, packed("mxfp4", 64, 64), case.weights[1])
    with pytest.raises(ValueError, match=r"`down_weight` is \(5, 32, 32\); it must be \(5, 64, 32\)"):
        moe_experts(*given, case.weights[0], packed("mxfp4", EXPERTS, 32, 32))
    torn = case.weights[0]._replace(scales=case.weights[0].scales[:, :3])
    with pytest.raises(ValueError, match=r"`gate_up_weight.scales` is \(5, 3, 2\)"):
        moe_experts(*given, torn, case.weights[1])
