"""A gated activation with its down projection, whose product is recomputed: kernels, memory, large shapes on a GPU."""

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.mlp import gated_activation as operators
from liger_trainer.kernels.mlp import gated_down as down_operators
from liger_trainer.kernels.mlp.glu import (
    geglu,
    geglu_down,
    geglu_down_reference,
    geglu_fused,
    swiglu,
    swiglu_down,
    swiglu_down_reference,
)
from liger_trainer.kernels.mlp.relu_squared import relu_squared
from liger_trainer.liger.operators.clamped_swiglu import clamped_swiglu
from tests.accuracy import assert_no_worse, result_and_gradients
from tests.accuracy import seeded_randn as randn
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.calls import recorded_calls, saved_tensors
from tests.device import assert_replayed_without_host_sync, peak_memory_of_one_run


def test_float64_runs_as_reference(device):
    gate, up, weight, bias = (
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in ((2, 4), (2, 4), (3, 4), 3)
    )
    linear = torch.nn.functional.linear
    torch.testing.assert_close(swiglu_down(gate, up, weight, bias), linear(swiglu(gate, up), weight, bias))
    torch.testing.assert_close(geglu_down(gate, up, weight), linear(geglu(gate, up), weight))
    fused = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(swiglu_down(fused, None, weight), swiglu_down(gate, up, weight))
    assert torch.autograd.gradcheck(swiglu_down, (gate, up, weight, bias))


@pytest.mark.parametrize(("target", "dtype"), on_targets((torch.bfloat16,), (torch.float32,)))
def test_compiles_ahead_of_time(target, dtype):
    gate, gate_up = torch.zeros(64, 1024, dtype=dtype), torch.zeros(64, 2048, dtype=dtype)
    silu, gelu = GatedActivation.of("silu"), GatedActivation.of("gelu_tanh")
    with recorded_launches() as launches:
        for given in ((gate, gate, silu), (gate_up, None, gelu)):
            operators.gated_activation_backward_(gate, *given[:2], *given[:2], gate, *given[2:])
        operators.gated_activation_backward_(gate, gate_up, None, gate_up, None, gate, silu._replace(interleaved=True))
    assert [launch.arguments["NEED_H"] for launch in launches] == [True] * 3
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90":  # 128-bit reads and writes: three tensors read, three written
            assert compiled.asm["ptx"].count(".v4.b32") == 6


HIDDEN, INTERMEDIATE = 6, 20

OPTIONS = {"gate_multiplier": 0.75, "down_multiplier": 1.5, "limit": 4.0}

VARIANTS = {
    "swiglu": (swiglu_down, swiglu_down_reference),
    "swiglu with options": (partial(swiglu_down, **OPTIONS), partial(swiglu_down_reference, **OPTIONS)),
    "geglu": (geglu_down, geglu_down_reference),
    "geglu, exact": (partial(geglu_down, approximate="none"), partial(geglu_down_reference, approximate="none")),
}

variants = pytest.mark.parametrize("variant", VARIANTS)

fusions = pytest.mark.parametrize("fused", [False, True])


def inputs(fused=False, shape=(2, 3), dtype=torch.float32, device="cpu", intermediate=INTERMEDIATE):
    gate_up = randn(*shape, 2 * intermediate, dtype=dtype, device=device, scale=2.0)
    gate, up = (gate_up, None) if fused else (x.contiguous() for x in gate_up.chunk(2, dim=-1))
    weight = randn(HIDDEN, intermediate, seed=1, dtype=dtype, device=device)
    bias = randn(HIDDEN, seed=3, dtype=dtype, device=device)
    return [x if x is None else x.requires_grad_() for x in (gate, up, weight, bias)]


def run(function, *tensors):
    y = function(*tensors)
    dy = randn(*y.shape, seed=2, dtype=torch.bfloat16, device=y.device).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x for x in tensors if x is not None and x.requires_grad], dy)]


def in_float64(function, *tensors):
    return run(function, *(x if x is None else x.detach().double().requires_grad_() for x in tensors))


@pytest.mark.kernel
@variants
@fusions
def test_float32_equals_float64(variant, fused, device):
    function, reference = VARIANTS[variant]
    for tensors in (inputs(fused, device=device), inputs(fused, (), device=device)):
        for ours, right in zip(run(function, *tensors), in_float64(reference, *tensors), strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.kernel
@fusions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(fused, dtype, device):
    tensors = inputs(fused, (64,), dtype, device, intermediate=600)
    ours, theirs = run(swiglu_down, *tensors), run(swiglu_down_reference, *tensors)
    assert_no_worse(ours, theirs, in_float64(swiglu_down_reference, *tensors))


@pytest.mark.kernel
@variants
def test_h_is_built_again_bit_for_bit(variant, device):
    """The gradient of the weight is the one of a model that saves h."""
    function, _ = VARIANTS[variant]
    gate, up, weight, bias = inputs(dtype=torch.bfloat16, device=device)
    dweight = run(function, gate, up, weight, bias)[3]
    identity = torch.eye(INTERMEDIATE, dtype=torch.bfloat16, device=device)
    h = function(gate, up, identity, None).detach()
    dy = randn(6, HIDDEN, seed=2, dtype=torch.bfloat16, device=device)
    assert torch.equal(dweight, dy.mT @ h.reshape(6, INTERMEDIATE))


@pytest.mark.kernel
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    intermediate=st.integers(1, 600),
    fused=st.booleans(),
    strided=st.booleans(),
    inplace=st.booleans(),
    needed=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
)
@settings(max_examples=15)
def test_any_shape_and_any_frozen_inputs(shape, intermediate, fused, strided, inplace, needed):
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    tensors = [x if x is None else x.detach() for x in inputs(fused, shape, device=device, intermediate=intermediate)]
    if strided and shape:
        tensors[:2] = [x if x is None else torch.stack((x, x), -1)[..., 0] for x in tensors[:2]]
    if fused and not any([needed[0], *needed[2:]]):
        needed[2] = True
    tensors = [x if x is None else x.clone().requires_grad_(n) for x, n in zip(tensors, needed)]
    right = [x if x is None else x.detach().double().requires_grad_(n) for x, n in zip(tensors, needed)]
    expected = run(swiglu_down_reference, *right)
    for ours, exact in zip(run(partial(swiglu_down, inplace_backward=inplace), *tensors), expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.kernel
def test_h_is_not_saved(device):
    with saved_tensors() as saved:
        swiglu_down(*inputs(device=device))
    assert sorted(tuple(x.shape) for x in saved) == sorted([(2, 3, INTERMEDIATE)] * 2 + [(HIDDEN, INTERMEDIATE)])


@pytest.mark.kernel
def test_a_checkpoint_does_not_repeat_the_product(device, monkeypatch):
    calls = recorded_calls(monkeypatch, down_operators, "gated_down")
    gate, up, weight, _ = inputs(device=device)

    def gradients(run):
        calls.clear()
        y = run(lambda *given: swiglu_down(given[0] * 1.0, *given[1:]), gate, up, weight)
        return torch.autograd.grad(y.square().sum(), (gate, up, weight))

    expected = gradients(lambda layer, *given: layer(*given))
    got = gradients(partial(checkpoint, use_reentrant=False))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(calls) == 1


@pytest.mark.kernel
@fusions
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_weight_needs_no_h(fused, frozen, device):
    gate, up, weight, _ = inputs(fused, device=device)
    with mock.patch.object(operators, "launch_backward", wraps=operators.launch_backward) as launch:
        run(swiglu_down, gate, up, weight.requires_grad_(not frozen), None)
    (call,) = launch.call_args_list
    assert (call.args[5] is None) == frozen


def mlp(x, fused, inplace, weight):
    gate, up = x * 2, x + 1
    tensors = (torch.cat((gate, up), -1), None) if fused else (gate, up)
    return swiglu_down(*tensors, weight, inplace_backward=inplace)


@pytest.mark.kernel
@fusions
@pytest.mark.parametrize("frozen", [False, True])
def test_inplace_backward_gives_the_same_gradients_also_twice(fused, frozen, device):
    x = randn(3, INTERMEDIATE, device=device).requires_grad_()
    weight = randn(HIDDEN, INTERMEDIATE, seed=1, device=device).requires_grad_(not frozen)
    leaves = [x] if frozen else [x, weight]
    expected = torch.autograd.grad(mlp(x, fused, False, weight).square().sum(), leaves)
    loss = mlp(x, fused, True, weight).square().sum()
    for retain in (True, False):
        ours = torch.autograd.grad(loss, leaves, retain_graph=retain)
        assert all(map(torch.equal, ours, expected))


@pytest.mark.kernel
def test_inplace_backward_writes_over_gate_and_up(device):
    gate, up, weight, bias = inputs(device=device)
    ours = run(partial(swiglu_down, inplace_backward=True), gate, up, weight, bias)
    assert [x.data_ptr() for x in ours[1:3]] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.kernel
def test_autocast_is_a_linear_layers(device):
    gate, up, weight, bias = inputs(device=device)
    gate, up = (x.detach().bfloat16().requires_grad_() for x in (gate, up))
    with torch.autocast(device, torch.bfloat16):
        ours = run(swiglu_down, gate, up, weight, bias)
        theirs = run(lambda gate, up, *parameters: F.linear(swiglu(gate, up), *parameters), gate, up, weight, bias)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)


@pytest.mark.kernel
def test_empty(device):
    for shape, intermediate in (((0,), 4), ((3,), 0), ((2, 0), 4)):
        for fused in (False, True):
            tensors = inputs(fused, shape, device=device, intermediate=intermediate)
            results = run(swiglu_down, *tensors)
            expected = run(swiglu_down_reference, *tensors)
            assert [x.shape for x in results] == [x.shape for x in expected]
            torch.testing.assert_close(results[-1], expected[-1])


@pytest.mark.kernel
def test_errors_name_the_argument(device):
    gate, up, weight, bias = inputs(device=device)
    with pytest.raises(ValueError, match=r"`weight` is \(6, 20\); it must be \(hidden, 10\)"):
        swiglu_down(gate, None, weight)
    with pytest.raises(ValueError, match=r"`weight` is \(20, 6\)"):
        geglu_down(gate, up, weight.mT)
    with pytest.raises(ValueError, match=r"`bias` is \(5,\); it must be \(6,\)"):
        swiglu_down(gate, up, weight, bias[1:])
    with pytest.raises(ValueError, match="`approximate` is 'erf'"):
        geglu_down(gate, up, weight, bias, "erf")


@pytest.mark.kernel
@fusions
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_fullgraph(fused, inplace, device):
    torch.compiler.reset()
    backend = "inductor" if device != "cpu" else "aot_eager"
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
    weight = randn(HIDDEN, INTERMEDIATE, seed=1, device=device).requires_grad_()
    for rows in (3, 6):
        x = randn(rows, INTERMEDIATE, device=device).requires_grad_()
        expected = torch.autograd.grad(mlp(x, fused, False, weight).square().sum(), (x, weight))
        ours = torch.autograd.grad(compiled(x, fused, inplace, weight).square().sum(), (x, weight))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def real_randn(*shape, device="cuda", dtype=torch.bfloat16, scale=2.0):
    return scale * torch.randn(shape, device=device, dtype=dtype)


ROWS, REAL_HIDDEN, REAL_INTERMEDIATE = 8192, 4096, 14336


def down_inputs():
    torch.manual_seed(0)
    weight = real_randn(REAL_HIDDEN, REAL_INTERMEDIATE, scale=0.02)
    gate, up = (real_randn(ROWS, REAL_INTERMEDIATE) for _ in range(2))
    return gate, up, weight, real_randn(ROWS, REAL_HIDDEN)


@pytest.mark.gpu
def test_rebuilt_product_is_the_saved_one(device):
    gate, up, weight, dy = down_inputs()
    ours = result_and_gradients(swiglu_down, dy, gate, up, weight)
    saved = result_and_gradients(lambda gate, up, weight: F.linear(swiglu(gate, up), weight), dy, gate, up, weight)
    assert all(map(torch.equal, ours, saved))
    part = dy[:256], gate[:256], up[:256], weight
    eager = result_and_gradients(swiglu_down_reference, *part)
    exact = result_and_gradients(swiglu_down_reference, *(x.double() for x in part))
    assert_no_worse(result_and_gradients(swiglu_down, *part), eager, exact)


@pytest.mark.gpu
def test_memory_of_a_rebuilt_product(device):
    gate, up, weight, dy = down_inputs()
    leaves = [x.requires_grad_() for x in (gate, up, weight)]
    product, y, dweight = (
        n * 2 for n in (ROWS * REAL_INTERMEDIATE, ROWS * REAL_HIDDEN, REAL_HIDDEN * REAL_INTERMEDIATE)
    )
    torch.autograd.grad(swiglu_down(*leaves), leaves, dy)  # cuBLAS takes its workspace
    held = []
    forward = peak_memory_of_one_run(lambda: held.append(swiglu_down(*leaves, inplace_backward=True)))
    assert forward <= product + y + 2**20
    assert torch.cuda.memory_allocated() > 0
    (output,) = held
    backward = peak_memory_of_one_run(lambda: torch.autograd.grad(output, leaves, dy))
    assert backward <= product + dweight + 2**20  # dh, which becomes h, and the weight's gradient


@pytest.mark.gpu
def test_no_host_sync_and_cuda_graph(device):
    gate, up, weight, dy = (real_randn(*shape) for shape in ((512, 1024), (512, 1024), (256, 1024), (512, 256)))
    gate_up, dh = real_randn(512, 2048), real_randn(512, 1024)

    def everything():
        results = result_and_gradients(swiglu_down, dy, gate, up, weight) + result_and_gradients(relu_squared, dh, gate)
        for inplace in (False, True):
            results += result_and_gradients(partial(swiglu, inplace_backward=inplace), dh, gate.clone(), up.clone())
            for function in (geglu_fused, clamped_swiglu):
                results += result_and_gradients(partial(function, inplace_backward=inplace), dh, gate_up.clone())
        return results

    assert_replayed_without_host_sync(everything)
