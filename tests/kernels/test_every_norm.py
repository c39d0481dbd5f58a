"""Every norm without a GPU: derivatives of the references, errors, fake tensors, and compilation for four GPUs."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_trainer.functional import (
    dyt,
    fused_add_layer_norm,
    group_norm,
    layer_norm,
    modulated_rms_norm,
    poly_norm,
    rms_norm,
)
from liger_trainer.kernels import runtime
from liger_trainer.kernels.norms import launch as _norm_common
from liger_trainer.kernels.norms import layer_norm as _layer_norm_kernels
from liger_trainer.kernels.norms import rms_norm as _rms_norm_kernels
from liger_trainer.kernels.parity import dyt as dyt_module
from liger_trainer.kernels.parity import group_norm as _group_norm_launch
from liger_trainer.kernels.parity import group_norm as group_norm_module
from liger_trainer.kernels.parity import modulated_rms_norm as _modulated_rms_norm_kernels
from liger_trainer.kernels.parity import poly_norm as poly_norm_module
from tests import aot
from tests.norm_cases import NORMS

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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
    channels = torch.randn(2, 6)
    assert torch.equal(group_norm(x, 3, *channels), F.group_norm(x, 3, *channels))
    torch.testing.assert_close(group_norm(x, 3, None, channels[0]), F.group_norm(x, 3) + channels[0, :, None])
    assert torch.equal(dyt(x, torch.tensor(0.5), weight, bias), torch.tanh(0.5 * x) * weight + bias)
    powers = [F.rms_norm(x**power, (8,), None, 1e-6) for power in (3, 2, 1)]
    mixed = 0.2 * powers[0] + 0.3 * powers[1] - 0.4 * powers[2] + 0.5
    torch.testing.assert_close(poly_norm(x, torch.tensor([0.2, 0.3, -0.4]), torch.tensor(0.5)), mixed)


@pytest.mark.parametrize("name", NORMS)
def test_half_precision_gradients_are_rounded_once_on_a_cpu(name):
    """A sum over thousands of rows kept in bf16 would stop growing."""
    tensors = NORMS[name].arguments((8, 64, 512) if name == "group_norm" else (8, 1024, 64), "cpu", torch.bfloat16)
    doubles = [tensor.double().requires_grad_() for tensor in tensors]
    gradients = []
    for function, leaves in ((NORMS[name].function, tensors), (NORMS[name].reference, doubles)):
        result = function(*(leaf.requires_grad_() for leaf in leaves))
        y = result[0] if isinstance(result, tuple) else result
        upstream = (torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
        gradients.append(torch.autograd.grad(y, leaves, upstream.to(y.dtype)))
    for ours, exact in zip(*gradients):
        assert (ours.double() - exact).norm() < 2**-8 * exact.norm()


def test_group_norm_of_nothing_has_gradients_of_zero():
    weight, bias = torch.ones(2, 4, requires_grad=True)
    y = group_norm(torch.zeros(2, 4, 0), 2, weight, bias)
    assert y.shape == (2, 4, 0)
    assert all(not gradient.any() for gradient in torch.autograd.grad(y.sum(), (weight, bias)))


X, ROW = torch.zeros(3, 4, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
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


@pytest.mark.parametrize("name", NORMS)
def test_fake_tensors_go_through_the_operators(name, monkeypatch):
    for module in (_norm_common, group_norm_module, dyt_module):  # operators; their fakes launch nothing
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    with FakeTensorMode():
        leaves = NORMS[name].arguments((3, 12, 20), "cpu", torch.bfloat16)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        outputs = NORMS[name].function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all("liger_trainer" in output.grad_fn.name() for output in outputs)
        gradients = torch.autograd.grad(outputs, leaves, [torch.empty_like(output) for output in outputs])
        for leaf, gradient in zip(leaves, gradients):
            assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


@pytest.fixture
def as_on(monkeypatch):
    """Makes launchers believe in a GPU: its limits, and 132 multiprocessors."""

    def believe(target):
        limits = _norm_common.DeviceLimits(16 if target == "gfx942" else 32, SHARED_MEMORY[target])
        for module in (_norm_common, _group_norm_launch):
            monkeypatch.setattr(module, "device_limits", lambda device: limits)
        modules = (_group_norm_launch, _layer_norm_kernels, _modulated_rms_norm_kernels, _rms_norm_kernels)
        for module in (*modules, dyt_module, poly_norm_module, runtime):
            monkeypatch.setattr(module, "num_sms", lambda device: 132)
        return limits

    return believe


def launches(hidden_size, dtype):
    """Every launch of the norms that are not in `test_norms`, forward and backward, recorded on CPU tensors."""
    ops = torch.ops.liger_trainer
    x, weight = torch.zeros(64, hidden_size, dtype=dtype), torch.zeros(hidden_size, dtype=dtype)
    scale, one, stat = torch.zeros(4, hidden_size, dtype=dtype), torch.zeros(1, dtype=dtype), torch.zeros(64)
    with aot.recorded_launches() as recorded:
        ops.fused_add_layer_norm(x, x, weight, weight, 1e-6, dtype)
        ops.fused_add_layer_norm_backward(x, x, x, weight, stat, stat, True, dtype, dtype)
        ops.modulated_rms_norm(x, weight, scale, scale, 1e-6, 0.0, "llama")
        ops.modulated_rms_norm_backward(x, x, weight, scale, stat, 0.0, "llama", True, True, True, dtype)
        ops.modulated_rms_norm(x, weight, x, x, 1e-6, 1.0, "gemma")
        ops.modulated_rms_norm_backward(x, x, weight, x, stat, 1.0, "gemma", True, True, True, None)
        ops.poly_norm(x, x.new_zeros(3), one, 1e-6)
        ops.poly_norm_backward(x, x, x.new_zeros(3), stat, stat, stat, True, True, one)
        ops.dyt(x, one, weight, weight)
        ops.dyt_backward(x, x, one, weight, True, True, True, dtype)
    return recorded


def compile_all(recorded, target, limits):
    for launch in recorded:
        compiled = aot.compile_launch(launch, target)
        assert launch.options["num_warps"] <= limits.max_warps
        assert compiled.metadata.shared <= limits.shared_memory, launch.kernel.__name__


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(128, torch.float32), (2560, torch.bfloat16), (16384, torch.float32)], ids=str
)
def test_every_launch_compiles_and_fits(target, hidden_size, dtype, as_on):
    limits = as_on(target)
    recorded = launches(hidden_size, dtype)
    assert len({launch.kernel.__name__ for launch in recorded}) == 9  # two of each norm, and the column sum
    compile_all(recorded, target, limits)


def group_norm_launches(shape, num_groups, dtype):
    ops = torch.ops.liger_trainer
    x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(shape[1], dtype=dtype)
    stat = torch.zeros(shape[0], num_groups)
    with aot.recorded_launches() as recorded:
        ops.group_norm(x, num_groups, weight, weight, 1e-6, dtype)
        ops.group_norm_backward(x, x, weight, stat, stat, True, dtype, dtype)
    return recorded


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(
    ("shape", "num_groups", "dtype", "count"),
    [
        ((1, 320, 64, 64), 32, torch.bfloat16, 5),
        ((1, 8, 20000), 2, torch.float32, 5),
        ((2, 1280, 16, 16), 32, torch.bfloat16, 3),
        ((5, 4), 4, torch.float32, 3),
    ],
    ids=str,
)
def test_every_group_norm_launch_compiles_and_fits(target, shape, num_groups, dtype, count, as_on):
    limits = as_on(target)
    recorded = group_norm_launches(shape, num_groups, dtype)
    assert len(recorded) == count  # spread groups have their sums taken first
    compile_all(recorded, target, limits)


@pytest.mark.parametrize("variant", ["only x", "only parameters", "no parameters"])
def test_variants_compile(variant, as_on):
    as_on("sm_90")
    ops, dtype = torch.ops.liger_trainer, torch.float32
    x, stat = torch.zeros(64, 100, dtype=torch.bfloat16), torch.zeros(64)
    weight, three, one = torch.zeros(100), torch.zeros(3), torch.zeros(1)
    wide, wide_stat = torch.zeros(2, 4, 30000, dtype=torch.bfloat16), torch.zeros(2, 2)
    given = None if variant == "no parameters" else weight
    needs_dx, needs = variant != "only parameters", variant == "only parameters"
    wanted = dtype if needs else None
    with aot.recorded_launches() as recorded:
        ops.fused_add_layer_norm(x, x, given, None, 1e-6, x.dtype)
        ops.fused_add_layer_norm_backward(x, None, x, given, stat, stat, needs_dx, wanted, wanted)
        for scale in (weight[None], x):
            ops.modulated_rms_norm(x, given, scale, None, 1e-6, 0.0, "none")
            ops.modulated_rms_norm_backward(x, x, given, scale, stat, 0.0, "none", needs_dx, needs, needs, None)
        ops.group_norm(wide, 2, None, None, 1e-5, dtype)
        ops.group_norm_backward(wide, wide, None, wide_stat, wide_stat, needs_dx, wanted, None)
        ops.poly_norm(x, three, None, 1e-6)
        ops.poly_norm_backward(x, x, three, stat, stat, stat, needs_dx, needs, None)
        ops.dyt(x, one, weight, None)
        ops.dyt_backward(x, x, one, weight, needs_dx, needs, needs, None)
    for launch in recorded:
        aot.compile_launch(launch, "sm_90")


def test_kernels_on_hopper_move_16_bytes_at_a_time(as_on):
    as_on("sm_90")
    recorded = launches(4096, torch.bfloat16) + group_norm_launches((1, 320, 64, 64), 32, torch.bfloat16)
    for launch in recorded:
        name = launch.kernel.__name__
        if name == "_column_sum_kernel":
            continue
        ptx = aot.compile_launch(launch, "sm_90").asm["ptx"]
        assert "ld.global.v4" in ptx or "cp.async.cg" in ptx, name
        if "moments" not in name and "sums" not in name:
            assert "st.global.v4" in ptx, name


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_a_second_derivative_of_the_reference_is_torchs(function):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    arguments = (None,) if function is rms_norm else (None, None)
    assert torch.autograd.gradgradcheck(lambda x: function(x, *arguments), (x,))
