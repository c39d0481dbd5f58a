"""What every norm must do: references, errors, compilation for four GPUs, kernels, and the sizes of models on a GPU."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_trainer.functional import (
    dyt,
    fused_add_layer_norm,
    fused_add_rms_norm,
    gated_rms_norm,
    group_norm,
    layer_norm,
    modulated_rms_norm,
    poly_norm,
    rms_norm,
)
from liger_trainer.kernels import rows as launch_module
from liger_trainer.kernels import runtime
from liger_trainer.kernels.norms import gated_rms_norm as gated_rms_norm_module
from liger_trainer.kernels.norms import layer_norm as layer_norm_module
from liger_trainer.kernels.norms import rms_norm as rms_norm_module
from liger_trainer.liger.operators import dyt as dyt_module
from liger_trainer.liger.operators import group_norm as group_norm_module
from liger_trainer.liger.operators import group_norm_kernels
from liger_trainer.liger.operators import modulated_rms_norm as modulated_rms_norm_module
from liger_trainer.liger.operators import poly_norm as poly_norm_module
from tests import aot
from tests.accuracy import assert_as_accurate
from tests.device import peak_memory
from tests.norm_cases import NORMS, as_tuple, outputs_and_gradients

LAUNCHERS = (launch_module, modulated_rms_norm_module, group_norm_module, dyt_module)
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@pytest.fixture(autouse=True)
def small_grid(request, monkeypatch):
    """Seeds; and a grid so small that kernels loop over several tiles of the small inputs used here."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("kernel"):
        for module in LAUNCHERS:
            monkeypatch.setattr(module, "num_sms", lambda device: 1)


@pytest.mark.parametrize("name", NORMS)
def test_gradcheck_in_float64(name):
    tensors = NORMS[name].arguments((2, 4, 5), "cpu", torch.float64)
    assert torch.autograd.gradcheck(NORMS[name].function, [tensor.requires_grad_() for tensor in tensors])


def test_references_are_the_formulas():
    x = torch.randn(2, 6, 8)
    weight, bias, scale, shift = torch.randn(4, 8)
    torch.testing.assert_close(
        modulated_rms_norm(x, weight, scale, shift), F.rms_norm(x, (8,), weight, 1e-6) * (1 + scale) + shift
    )
    y, total = fused_add_layer_norm(x, x * 2, weight, bias)
    assert torch.equal(total, x * 3)
    assert torch.equal(y, F.layer_norm(x * 3, (8,), weight, bias))
    halves = x.bfloat16(), (x * 2).bfloat16(), weight.bfloat16()
    y, total = fused_add_rms_norm(*halves, 1e-5, 1.0, "gemma")
    assert torch.equal(total, halves[0] + halves[1])
    assert torch.equal(y, rms_norm(total, halves[2], 1e-5, 1.0, "gemma"))
    channels = torch.randn(2, 6)
    assert torch.equal(group_norm(x, 3, *channels), F.group_norm(x, 3, *channels))
    torch.testing.assert_close(group_norm(x, 3, None, channels[0]), F.group_norm(x, 3) + channels[0, :, None])
    assert torch.equal(dyt(x, torch.tensor(0.5), weight, bias), torch.tanh(0.5 * x) * weight + bias)
    powers = [F.rms_norm(x**power, (8,), None, 1e-6) for power in (3, 2, 1)]
    mixed = 0.2 * powers[0] + 0.3 * powers[1] - 0.4 * powers[2] + 0.5
    torch.testing.assert_close(poly_norm(x, torch.tensor([0.2, 0.3, -0.4]), torch.tensor(0.5)), mixed)


@pytest.mark.parametrize("name", NORMS)
def test_half_precision_gradients_are_rounded_once_on_a_cpu(name):
    """A sum over thousands of rows in bf16 would stop growing."""
    tensors = NORMS[name].arguments((8, 64, 512) if name == "group_norm" else (8, 1024, 64), "cpu", torch.bfloat16)
    doubles = [tensor.double().requires_grad_() for tensor in tensors]
    gradients = []
    for function, leaves in ((NORMS[name].function, tensors), (NORMS[name].reference, doubles)):
        result = function(*(leaf.requires_grad_() for leaf in leaves))
        y = result[0] if isinstance(result, tuple) else result
        upstream = (torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
        gradients.append(torch.autograd.grad(y, leaves, upstream.to(y.dtype)))
    for ours, exact in zip(*gradients):
        assert (ours.double() - exact).norm() < 2**-6 * exact.norm()


def test_group_norm_of_nothing_has_gradients_of_zero():
    weight, bias = torch.ones(2, 4, requires_grad=True)
    y = group_norm(torch.zeros(2, 4, 0), 2, weight, bias)
    assert y.shape == (2, 4, 0)
    assert all(not gradient.any() for gradient in torch.autograd.grad(y.sum(), (weight, bias)))


X, ROW = torch.zeros(3, 4, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, ROW[1:]), r"`weight` of rms_norm has shape \(7,\).* is 8; give .* shape \(8,\)"),
        (lambda: rms_norm(X, ROW[None]), r"`weight` of rms_norm has shape \(1, 8\)"),
        (lambda: rms_norm(X, ROW.long()), "`weight` of rms_norm has dtype torch.int64"),
        (lambda: rms_norm(X.long(), ROW), "`x` of rms_norm has dtype torch.int64; give a floating point tensor"),
        (lambda: rms_norm(X, ROW.to("meta")), "`weight` of rms_norm is on meta, but `x` is on cpu"),
        (lambda: rms_norm(X[..., :0], None), r"`x` of rms_norm has shape \(3, 4, 0\).*hidden_size >= 1"),
        (lambda: rms_norm(X.sum(), None), r"`x` of rms_norm has shape \(\)"),
        (lambda: rms_norm(X, ROW, casting="lama"), "`casting` of rms_norm is 'lama'; it must be one of 'llama'"),
        (lambda: fused_add_rms_norm(X, X[:1], ROW), r"`residual` of fused_add_rms_norm has shape torch.Size"),
        (lambda: fused_add_rms_norm(X, X.half(), ROW), "`residual` .* dtype torch.float16, but `x` has torch"),
        (lambda: fused_add_rms_norm(X, X, ROW, casting=""), "`casting` of fused_add_rms_norm is ''"),
        (lambda: layer_norm(X, ROW, ROW[1:]), r"`bias` of layer_norm has shape \(7,\)"),
        (lambda: layer_norm(X, ROW, ROW, group_size=3), "`group_size` of layer_norm is 3, .* is 8; give a divisor"),
        (lambda: gated_rms_norm(X, X, ROW, group_size=0), "`group_size` of gated_rms_norm is 0"),
        (lambda: gated_rms_norm(X, X[:1], ROW), r"`gate` of gated_rms_norm has shape torch.Size"),
        (lambda: gated_rms_norm(X, X.long(), ROW), "`gate` of gated_rms_norm has dtype torch.int64; give a floating"),
        (lambda: gated_rms_norm(X, X.to("meta"), ROW), "`gate` of gated_rms_norm has device meta"),
        (lambda: gated_rms_norm(X, X, ROW[1:]), r"`weight` of gated_rms_norm has shape \(7,\)"),
        (lambda: gated_rms_norm(X, X, ROW, casting="olmo2"), "`casting` of .* is 'olmo2'; it must be 'llama' or 'gem"),
        (lambda: gated_rms_norm(X, X, ROW, activation="relu"), "`activation` .* is 'relu'; it must be 'silu' or 'sig"),
        (lambda: modulated_rms_norm(X, ROW, torch.zeros(2, 8)), r"`scale` .* has shape \(2, 8\), which does not fit"),
        (lambda: modulated_rms_norm(X, ROW, ROW, torch.zeros(3, 7)), r"`shift` .* shape \(3, 7\).* \(3, 8\), for each"),
        (lambda: modulated_rms_norm(X, ROW, ROW.long()), r"`scale` of modulated_rms_norm is torch.int64 on cpu; give"),
        (lambda: modulated_rms_norm(X, ROW, ROW.to("meta")), r"`scale` .* on meta; give a .* tensor on cpu, where `x`"),
        (lambda: modulated_rms_norm(X, ROW[1:], ROW), r"`weight` of modulated_rms_norm has shape \(7,\)"),
        (lambda: modulated_rms_norm(X, ROW, ROW, casting="llma"), "`casting` of modulated_rms_norm is 'llma'"),
        (lambda: fused_add_layer_norm(X, X[:1], ROW, ROW), r"`residual` of fused_add_layer_norm has shape"),
        (lambda: fused_add_layer_norm(X, X, ROW, ROW[1:]), r"`bias` of fused_add_layer_norm has shape \(7,\)"),
        (lambda: group_norm(X, 3), "`num_groups` of group_norm is 3, which does not divide the 4 channels"),
        (lambda: group_norm(X, 0), "`num_groups` of group_norm is 0"),
        (lambda: group_norm(ROW, 1), r"`x` of group_norm has shape \(8,\).*\(samples, channels, ...\)"),
        (lambda: group_norm(X.long(), 1), "`x` of group_norm has .* dtype torch.int64"),
        (
            lambda: group_norm(X, 2, ROW),
            r"`weight` of group_norm has shape \(8,\) .* shape \(4,\), one number for each",
        ),
        (lambda: poly_norm(X, ROW), r"`weight` of poly_norm has shape \(8,\).* shape \(3,\) on cpu"),
        (lambda: poly_norm(X, ROW[:3], ROW), r"`bias` of poly_norm has shape \(8,\).* shape \(1,\)"),
        (lambda: dyt(X, ROW, ROW), r"`alpha` of dyt has shape \(8,\).* give one floating point number"),
        (lambda: dyt(X, ROW[0], ROW[1:]), r"`gamma` of dyt has shape \(7,\)"),
    ],
)
def test_bad_arguments_get_an_error_that_names_them(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def in_layout(x, layout):
    """`x` with the same numbers, its memory in another order or with gaps."""
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "slice":
        return torch.cat((x, x, x), dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]
    return x.repeat_interleave(2, dim=-1)[..., ::2] if layout == "strided" else x


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
def test_fake_tensors_go_through_the_operators(name, layout, monkeypatch):
    monkeypatch.setattr(runtime, "TRITON_DEVICES", ("cpu",))  # operators; their fakes launch nothing
    promoted = name in (
        "rms_norm",
        "fused_add_rms_norm",
        "gated_rms_norm of groups",
    )  # which multiply by the weight last
    keeps_layout = "modulated" not in name and name != "group_norm"
    with FakeTensorMode():
        x, *parameters = NORMS[name].arguments((3, 12, 20), "cpu", torch.bfloat16, torch.float32)
        leaves = [leaf.detach().requires_grad_() for leaf in (in_layout(x, layout), *parameters)]
        outputs = as_tuple(NORMS[name].function(*leaves))
        assert outputs[0].dtype == (torch.float32 if promoted else x.dtype)
        assert all(output.dtype == x.dtype for output in outputs[1:])
        for output in outputs:
            assert "liger_trainer" in output.grad_fn.name()
            assert (output.shape, output.device) == (x.shape, x.device)
        gradients = torch.autograd.grad(outputs, leaves, [torch.empty_like(output) for output in outputs])
        for leaf, gradient in zip(leaves, gradients):
            assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
        for tensor in (*outputs, gradients[0]) if keeps_layout and layout != "slice" else ():
            assert tensor.stride() == leaves[0].stride()


@pytest.fixture
def as_on(monkeypatch):
    """Makes launchers believe in a GPU: its limits, and 132 multiprocessors."""

    def believe(target):
        launch_module.fit_config.cache_clear()
        limits = launch_module.DeviceLimits(16 if target == "gfx942" else 32, SHARED_MEMORY[target])
        for module in (launch_module, group_norm_module):
            monkeypatch.setattr(module, "device_limits", lambda device: limits)
        for module in (*LAUNCHERS, runtime):
            monkeypatch.setattr(module, "num_sms", lambda device: 132)
        return limits

    yield believe
    launch_module.fit_config.cache_clear()


def launches(hidden_size, dtype):
    """Every launch of the norms of rows, forward and backward, recorded on CPU tensors."""
    ops = torch.ops.liger_trainer
    x, weight = torch.zeros(64, hidden_size, dtype=dtype), torch.zeros(hidden_size, dtype=dtype)
    scale, one, stat = torch.zeros(4, hidden_size, dtype=dtype), torch.zeros(1, dtype=dtype), torch.zeros(64)
    four = torch.zeros(64, 4)
    with aot.recorded_launches() as recorded:
        ops.rms_norm(x, weight, 1e-6, 0.0, "llama")
        ops.rms_norm_backward(x, x, weight, stat, 0.0, "llama", [True, True])
        ops.fused_add_rms_norm(x, x, weight, 1e-6, 1.0, "gemma")
        ops.fused_add_rms_norm_backward(x, x, x, weight, stat, 1.0, "gemma", [True, True])
        ops.layer_norm(x, weight, weight, 1e-6, dtype)
        ops.layer_norm_backward(x, x, weight, weight, stat, stat, [True] * 3)
        ops.fused_add_layer_norm(x, x, weight, weight, 1e-6, dtype)
        ops.fused_add_layer_norm_backward(x, x, x, weight, weight, stat, stat, [True] * 3)
        ops.layer_norm(x, weight, weight, 1e-6, dtype, 4)
        ops.layer_norm_backward(x, x, weight, weight, four, four, [True] * 3, 4)
        for groups, gate_first in ((1, False), (4, True)):
            stats = four if groups == 4 else stat
            ops.gated_rms_norm(x, x, weight, 1e-6, groups, "silu", gate_first, "llama")
            ops.gated_rms_norm_backward(x, x, x, weight, stats, groups, "silu", gate_first, [True] * 3)
        ops.modulated_rms_norm(x, weight, scale, scale, 1e-6, 0.0, "llama")
        ops.modulated_rms_norm_backward(x, x, weight, scale, stat, 0.0, "llama", [True] * 3, dtype)
        ops.modulated_rms_norm(x, weight, x, x, 1e-6, 1.0, "gemma")
        ops.modulated_rms_norm_backward(x, x, weight, x, stat, 1.0, "gemma", [True] * 3, None)
        ops.poly_norm(x, x.new_zeros(3), one, 1e-6)
        ops.poly_norm_backward(x, x, x.new_zeros(3), one, stat, stat, stat, [True] * 3)
        ops.dyt(x, one, weight, weight)
        ops.dyt_backward(x, x, one, weight, weight, [True] * 4)
    return recorded


def compile_all(recorded, target, limits):
    for launch in recorded:
        compiled = aot.compile_launch(launch, target)
        assert launch.options["num_warps"] <= limits.max_warps
        assert compiled.metadata.shared <= limits.shared_memory, launch.kernel.__name__


@pytest.mark.parametrize(
    ("target", "hidden_size", "dtype"),
    aot.on_targets((16384, torch.float32), (2560, torch.float16), (128, torch.bfloat16)),
    ids=str,
)
def test_every_launch_compiles_and_fits(target, hidden_size, dtype, as_on):
    limits = as_on(target)
    recorded = launches(hidden_size, dtype)
    assert len({launch.kernel.__name__ for launch in recorded}) == 13  # two of each norm, and the column sum
    compile_all(recorded, target, limits)


def group_norm_launches(shape, num_groups, dtype):
    ops = torch.ops.liger_trainer
    x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(shape[1], dtype=dtype)
    stat = torch.zeros(shape[0], num_groups)
    with aot.recorded_launches() as recorded:
        ops.group_norm(x, num_groups, weight, weight, 1e-6, dtype)
        ops.group_norm_backward(x, x, weight, weight, stat, stat, [True] * 3)
    return recorded


@pytest.mark.parametrize(
    ("target", "shape", "num_groups", "dtype", "count"),
    aot.on_targets(
        ((1, 8, 20000), 2, torch.float32, 5),
        ((1, 320, 64, 64), 32, torch.bfloat16, 5),
        ((2, 1280, 16, 16), 32, torch.bfloat16, 3),
        ((5, 4), 4, torch.float32, 3),
    ),
    ids=str,
)
def test_every_group_norm_launch_compiles_and_fits(target, shape, num_groups, dtype, count, as_on):
    limits = as_on(target)
    recorded = group_norm_launches(shape, num_groups, dtype)
    assert len(recorded) == count  # spread groups have their sums taken first
    compile_all(recorded, target, limits)


@pytest.mark.parametrize("variant", ["only x", "only parameters", "no parameters"])
def test_variants_compile_and_sum_what_is_needed_alone(variant, as_on):
    as_on("sm_90")
    ops, dtype = torch.ops.liger_trainer, torch.float32
    x, stat = torch.zeros(64, 100, dtype=torch.bfloat16), torch.zeros(64)
    weight, three, one = torch.zeros(100), torch.zeros(3), torch.zeros(1)
    wide, wide_stat = torch.zeros(2, 4, 30000, dtype=torch.bfloat16), torch.zeros(2, 2)
    given = None if variant == "no parameters" else weight
    needs_dx, needs = variant != "only parameters", variant == "only parameters"
    wide_weight = torch.zeros(4) if needs else None
    of_both, of_weight, of_bias = [needs_dx, needs, needs], [needs_dx, needs, False], [needs_dx, False, needs]
    with aot.recorded_launches() as recorded:
        for casting in ("llama", "none"):
            ops.rms_norm(x, given, 1e-6, 0.0, casting)
            ops.rms_norm_backward(x.float(), x, given, stat, 0.0, casting, of_weight[:2])
        ops.layer_norm(x, given, None, 1e-5, dtype)
        ops.layer_norm_backward(x, x, given, weight, stat, stat, of_weight)
        ops.layer_norm_backward(x, x, given, weight, stat, stat, of_bias)
        ops.fused_add_layer_norm(x, x, given, None, 1e-6, x.dtype)
        ops.fused_add_layer_norm_backward(x, None, x, given, weight, stat, stat, of_both)
        for gate_first in (False, True):
            ops.gated_rms_norm(x, x, weight, 1e-6, 1, "sigmoid", gate_first, "gemma")
            ops.gated_rms_norm_backward(x, x, x, weight, stat, 1, "sigmoid", gate_first, [needs_dx, needs_dx, needs])
            ops.gated_rms_norm_backward(x, x, x, weight, stat, 1, "silu", gate_first, [False, needs_dx, needs])
        for scale in (weight[None], x):
            ops.modulated_rms_norm(x, given, scale, None, 1e-6, 0.0, "none")
            ops.modulated_rms_norm_backward(x, x, given, scale, stat, 0.0, "none", of_both, None)
        ops.group_norm(wide, 2, None, None, 1e-5, dtype)
        ops.group_norm_backward(wide, wide, wide_weight, None, wide_stat, wide_stat, of_weight)
        ops.poly_norm(x, three, None, 1e-6)
        ops.poly_norm_backward(x, x, three, None, stat, stat, stat, of_weight)
        ops.dyt(x, one, weight, None)
        ops.dyt_backward(x, x, one, weight, None, [*of_both, False])
    # A gradient that nobody needs is not summed.
    sums = [launch for launch in recorded if launch.kernel.__name__ == "_column_sum_kernel"]
    assert bool(sums) == needs
    for launch in recorded:
        aot.compile_launch(launch, "sm_90")


def test_kernels_on_hopper_move_16_bytes_at_a_time(as_on):
    as_on("sm_90")
    recorded = launches(4096, torch.bfloat16) + group_norm_launches((1, 320, 64, 64), 32, torch.bfloat16)
    for launch in recorded:
        name = launch.kernel.__name__
        if name == "_column_sum_kernel":
            continue
        assembly = aot.compile_launch(launch, "sm_90").asm
        ptx = assembly["ptx"]
        assert "ld.global.v4" in ptx or "cp.async.cg" in ptx, name
        if name == "_rms_norm_backward_kernel":  # which fetches tiles ahead
            assert "async_copy_global_to_local" in assembly["ttgir"]
            assert "cp.async.cg.shared.global" in ptx  # the 16-byte copies; narrower ones are cp.async.ca
        if "moments" not in name and "sums" not in name:
            assert "st.global.v4" in ptx, name


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_a_second_derivative_of_the_reference_is_torchs(function):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    arguments = (None,) if function is rms_norm else (None, None)
    assert torch.autograd.gradgradcheck(lambda x: function(x, *arguments), (x,))


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def upstream_of(outputs):
    """Gradients of one sign for the most part, so that the sums of scalar gradients do not cancel."""
    return [torch.randn_like(output) + 1 for output in outputs]


def leaves_of(tensors):
    return [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]


def assert_same_gradients(name, tensors, upstream=None):
    """Values and gradients of fp32 `tensors`, in their memory layout, are those of the reference in float64.

    Where a group has one or two numbers, its values are differences in which torch itself loses most digits.
    """
    case = NORMS[name]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    ours, eager, exact = (
        as_tuple(function(*given))
        for function, given in ((case.function, leaves), (case.reference, leaves), (case.reference, wide))
    )
    upstream = upstream_of(eager) if upstream is None else [upstream(output) for output in eager]
    results = [
        [*outputs, *torch.autograd.grad(outputs, given, [dy.to(outputs[0].dtype) for dy in upstream])]
        for outputs, given in ((ours, leaves), (eager, leaves), (exact, wide))
    ]
    largest = max(right.norm() for right in results[2])
    for mine, theirs, right in zip(*results):
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + 2e-5 * largest


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 12, 20), (2, 2, 1100)], ids=str)
def test_is_as_accurate_as_eager(device, name, dtype, shape):
    case = NORMS[name]
    tensors = case.arguments(shape, device, dtype)
    upstream = upstream_of(as_tuple(case.reference(*tensors)))
    assert_as_accurate(case.function, case.reference, tensors, upstream)


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_parameters_of_another_dtype(device, name, dtype, parameter_dtype):
    case = NORMS[name]
    tensors = case.arguments((3, 12, 20), device, dtype, parameter_dtype)
    upstream = upstream_of(as_tuple(case.reference(*tensors)))
    assert_as_accurate(case.function, case.reference, tensors, upstream)


@pytest.mark.kernel
@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(NORMS)),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "transposed", "slice", "strided"]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_layout(name, shape, dtype, layout, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    case = NORMS[name]
    x, *rest = case.arguments(shape, device, torch.float32)
    x = in_layout(x, layout)
    if dtype == torch.float32:
        assert_same_gradients(name, [x, *rest])
    else:
        y = as_tuple(case.function(x.to(dtype), *(tensor.to(dtype) for tensor in rest)))[0]
        truth = as_tuple(case.reference(x.to(dtype).double(), *(tensor.to(dtype).double() for tensor in rest)))[0]
        assert (y.dtype, y.shape) == (dtype, x.shape)
        error = torch.linalg.vector_norm(y.double() - truth)
        assert error <= 4 * torch.finfo(dtype).eps * torch.linalg.vector_norm(truth) + 1e-6


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("upstream", ["expanded", "transposed"])
def test_any_layout_of_gradient(device, name, upstream):
    def gradient(output):
        if upstream == "expanded":
            return torch.ones((), device=device).expand(output.shape)
        return in_layout(torch.randn_like(output), "transposed")

    assert_same_gradients(name, NORMS[name].arguments((3, 12, 20), device, torch.float32), gradient)


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
def test_each_input_alone_gets_its_gradient(device, name):
    tensors = NORMS[name].arguments((3, 12, 20), device, torch.float32)
    leaves = leaves_of(tensors)
    outputs = as_tuple(NORMS[name].function(*leaves))
    upstream = upstream_of(outputs)
    together = torch.autograd.grad(outputs, leaves, upstream)
    for index, leaf in enumerate(leaves):
        frozen = [*tensors[:index], leaf, *tensors[index + 1 :]]
        outputs = as_tuple(NORMS[name].function(*frozen))
        wanted = [output.requires_grad for output in outputs]
        used = [output for output, want in zip(outputs, wanted) if want]
        (alone,) = torch.autograd.grad(used, leaf, [u for u, want in zip(upstream, wanted) if want])
        # Another compilation of the kernel, whose products and sums a GPU may fuse otherwise.
        torch.testing.assert_close(alone, together[index])


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
def test_caller_tensors_are_never_written(device, name):
    leaves = leaves_of(NORMS[name].arguments((3, 12, 20), device, torch.float32))
    outputs = as_tuple(NORMS[name].function(*leaves))
    upstream = upstream_of(outputs)
    everything = [*leaves, *outputs, *upstream]
    before = [tensor.detach().clone() for tensor in everything]
    torch.autograd.backward(outputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(everything, before))


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(0, 12, 20), (3, 12, 0), (3, 0, 20)], ids=str)
def test_empty_inputs(device, name, shape):
    if shape[NORMS[name].channel_dim] == 0:
        with pytest.raises(ValueError, match=r"`(x|num_groups)` of"):
            NORMS[name].function(*NORMS[name].arguments(shape, device, torch.float32))
        return
    leaves = leaves_of(NORMS[name].arguments(shape, device, torch.float32))
    outputs = as_tuple(NORMS[name].function(*leaves))
    gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])
    assert all(output.shape == shape for output in outputs)
    for leaf, gradient in zip(leaves, gradients):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.kernel
@pytest.mark.parametrize("name", NORMS)
def test_compiled_graph_is_whole_and_takes_any_batch(device, name):
    function = NORMS[name].function
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (5, 7, 9):  # not 3, the size of PolyNorm's weight
            leaves = leaves_of(NORMS[name].arguments((batch, 12, 20), device, torch.float32))
            upstream = upstream_of(as_tuple(function(*leaves)))
            ours, theirs = (outputs_and_gradients(f, leaves, upstream) for f in (compiled, function))
            assert all(map(torch.equal, ours, theirs))


OF_ROWS = [name for name in NORMS if name != "group_norm"]
ON_THE_PATH = ("rms_norm", "fused_add_rms_norm", "layer_norm")


def inputs(name, shape, device, dtype=torch.bfloat16):
    """Leaves in the order of the function's arguments, and upstream gradients of its outputs."""
    leaves = [leaf.requires_grad_() for leaf in NORMS[name].arguments(shape, device, dtype)]
    # Of one sign for the most part, so that the sums of scalar gradients do not cancel.
    upstream = [torch.randn(shape, device=device).add_(1).to(dtype) for _ in range(2 if "fused" in name else 1)]
    return leaves, upstream


def assert_as_accurate_as_eager(function, reference, leaves, upstream):
    ours = outputs_and_gradients(function, leaves, upstream)
    eager = outputs_and_gradients(reference, leaves, upstream)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = outputs_and_gradients(reference, exact_leaves, [dy.double() for dy in upstream])
    for index, (our, their, exact) in enumerate(zip(ours, eager, truth)):
        our_error, their_error = (torch.linalg.vector_norm(result.double() - exact) for result in (our, their))
        rounding = torch.finfo(our.dtype).eps / 2 if our.numel() < 10 else 1e-6
        assert our_error <= 1.1 * their_error + rounding * torch.linalg.vector_norm(exact), f"result {index}"


SHAPES = ((4, 2048, 4096), (64, 4096, 128), (3, 333, 2560), (2, 40, 16384))
LARGE = ((16384, 4096), (655360, 128), (16384, 16384), (70001, 2560), (3, 65536))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape"), [*product(OF_ROWS, SHAPES), *product(ON_THE_PATH, LARGE)], ids=str)
def test_real_shapes_are_as_accurate_as_eager(device, name, shape):
    assert_as_accurate_as_eager(NORMS[name].function, NORMS[name].reference, *inputs(name, shape, device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(2, 320, 128, 128), (4, 1280, 16, 16), (1, 32, 200, 333), (64, 64, 7, 7), (300, 256), (1, 4, 3000001)],
    ids=str,
)
def test_real_group_norms_are_as_accurate_as_eager(device, shape):
    groups = 32 if shape[1] % 32 == 0 else 2
    reference = torch.nn.functional.group_norm
    leaves, upstream = inputs("group_norm", shape, device)
    functions = [lambda x, w, b, f=f: f(x, groups, w, b) for f in (group_norm, reference)]
    assert_as_accurate_as_eager(*functions, leaves, upstream)


@pytest.mark.gpu
def test_another_batch_compiles_nothing(device):
    kernels = (
        gated_rms_norm_module._gated_rms_norm_forward_kernel,
        gated_rms_norm_module._gated_rms_norm_backward_kernel,
        layer_norm_module._layer_norm_forward_kernel,
        layer_norm_module._layer_norm_backward_kernel,
        modulated_rms_norm_module._modulated_rms_norm_forward_kernel,
        modulated_rms_norm_module._modulated_rms_norm_backward_kernel,
        rms_norm_module._rms_norm_forward_kernel,
        rms_norm_module._rms_norm_backward_kernel,
        group_norm_kernels.group_norm_forward_kernel,
        group_norm_kernels.group_norm_backward_kernel,
        group_norm_kernels.moments_kernel,
        group_norm_kernels.channel_sums_kernel,
        poly_norm_module._poly_norm_forward_kernel,
        poly_norm_module._poly_norm_backward_kernel,
        dyt_module._dyt_forward_kernel,
        dyt_module._dyt_backward_kernel,
    )
    counts = set()
    for batch in (2, 3, 7, 16, 1001):
        for name in OF_ROWS:
            outputs_and_gradients(NORMS[name].function, *inputs(name, (batch, 3, 192), device))
        for name in ON_THE_PATH:
            outputs_and_gradients(NORMS[name].function, *inputs(name, (batch // 2, 192), device))  # one row, too
        for positions in (64, 4096 * 16):
            outputs_and_gradients(NORMS["group_norm"].function, *inputs("group_norm", (batch, 4, positions), device))
        counts.add(tuple(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels))
    assert len(counts) == 1, counts


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_THE_PATH)
def test_inductor_takes_the_operators_into_one_graph(device, name):
    leaves, upstream = inputs(name, (64, 512), device)

    def after_a_matmul(x, *rest):
        return NORMS[name].function(F.silu(x) * 2, *rest)

    compiled = outputs_and_gradients(torch.compile(after_a_matmul, fullgraph=True), leaves, upstream)
    plain = outputs_and_gradients(after_a_matmul, leaves, upstream)
    torch.testing.assert_close(compiled, plain, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
def test_memory_is_that_of_the_results(device, name):
    leaves, upstream = inputs(name, (4, 2048, 4096), device)
    results = outputs_and_gradients(NORMS[name].function, leaves, upstream)
    held = sum({result.data_ptr(): result.nbytes for result in results}.values())
    del results
    peak = peak_memory(lambda: outputs_and_gradients(NORMS[name].function, leaves, upstream))
    # Statistics and partial sums: up to three fp32 rows for each of 8 programs a multiprocessor.
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    allowance = 3 * 8 * sms * 4096 * 4 if name != "group_norm" else 2**25
    assert peak <= held + allowance


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["modulated_rms_norm", "poly_norm", "dyt", "group_norm"])
def test_more_than_2_to_the_31_numbers(device, name):
    shape = (2**10 + 1, 2**9, 4096)
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    x, *rest = NORMS[name].arguments((shape[0], 1 if name != "group_norm" else 512, shape[2]), device, torch.bfloat16)
    del x
    x = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    rest = [tensor.requires_grad_() for tensor in rest]
    y = NORMS[name].function(x, *rest)
    dx, *_ = torch.autograd.grad(y, (x, *rest), x.detach())
    last = slice(shape[0] - 1, shape[0])
    part_x = x.detach()[last].float().requires_grad_()
    part_rest = [(t.detach()[last] if t.shape[0] == shape[0] else t.detach()).float() for t in rest]
    part_y = NORMS[name].reference(part_x, *part_rest)
    (part_dx,) = torch.autograd.grad(part_y, part_x, part_x.detach())
    for ours, theirs in ((y[last], part_y), (dx[last], part_dx)):
        error = torch.linalg.vector_norm(ours.float() - theirs)
        assert error <= 1e-2 * torch.linalg.vector_norm(theirs)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("name", NORMS)
def test_a_device_that_is_not_the_current_one(name):
    leaves, upstream = inputs(name, (3, 12, 128), "cuda:1", torch.float32)
    assert torch.cuda.current_device() == 0
    ours = outputs_and_gradients(NORMS[name].function, leaves, upstream)
    torch.testing.assert_close(
        ours, outputs_and_gradients(NORMS[name].reference, leaves, upstream), rtol=1e-4, atol=1e-3
    )
