"""What every norm's kernels must do: values, gradients, layouts, graphs, the same bits, nothing done in vain."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.norms import layer_norm as _layer_norm_kernels
from liger_trainer.kernels.norms import rms_norm as _rms_norm_kernels
from liger_trainer.kernels.parity import dyt, poly_norm
from liger_trainer.kernels.parity import group_norm as _group_norm_launch
from liger_trainer.kernels.parity import modulated_rms_norm as _modulated_rms_norm_kernels
from tests.accuracy import assert_as_accurate
from tests.norm_cases import NORMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAUNCHERS = (_group_norm_launch, _layer_norm_kernels, _modulated_rms_norm_kernels, _rms_norm_kernels, dyt, poly_norm)


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Few programs, so that each loops over several tiles of the small inputs used here."""
    for module in LAUNCHERS:
        monkeypatch.setattr(module, "num_sms", lambda device: 1)
    torch.manual_seed(0)


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def upstream_of(outputs):
    """Gradients of one sign for the most part, so that the sums of scalar gradients do not cancel."""
    return [torch.randn_like(output) + 1 for output in outputs]


def leaves_of(tensors):
    return [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]


def assert_same_gradients(name, tensors, upstream=None):
    """Values and gradients of fp32 `tensors`, as they lie in memory, are those of the reference."""
    case = NORMS[name]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    ours, theirs = as_tuple(case.function(*leaves)), as_tuple(case.reference(*leaves))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    upstream = upstream_of(theirs) if upstream is None else [upstream(output) for output in theirs]
    gradients = [torch.autograd.grad(outputs, leaves, upstream) for outputs in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 12, 20), (2, 2, 1100)], ids=str)
def test_is_as_accurate_as_eager(device, name, dtype, shape):
    case = NORMS[name]
    tensors = case.arguments(shape, device, dtype)
    upstream = upstream_of(as_tuple(case.reference(*tensors)))
    assert_as_accurate(case.function, case.reference, tensors, upstream)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.float16], ids=str)
def test_parameters_of_another_dtype(device, name, parameter_dtype):
    case = NORMS[name]
    tensors = case.arguments((3, 12, 20), device, torch.bfloat16, parameter_dtype)
    upstream = upstream_of(as_tuple(case.reference(*tensors)))
    assert_as_accurate(case.function, case.reference, tensors, upstream)


@settings(max_examples=30, deadline=None)
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
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "slice":
        x = torch.cat((x, x, x), dim=-1)[..., shape[-1] : 2 * shape[-1]]
    elif layout == "strided":
        x = x.repeat_interleave(2, dim=-1)[..., ::2]
    if dtype == torch.float32:
        assert_same_gradients(name, [x, *rest])
    else:
        y = as_tuple(case.function(x.to(dtype), *(tensor.to(dtype) for tensor in rest)))[0]
        truth = as_tuple(case.reference(x.to(dtype).double(), *(tensor.to(dtype).double() for tensor in rest)))[0]
        assert (y.dtype, y.shape) == (dtype, x.shape)
        error = torch.linalg.vector_norm(y.double() - truth)
        assert error <= 4 * torch.finfo(dtype).eps * torch.linalg.vector_norm(truth) + 1e-6


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("upstream", ["expanded", "transposed"])
def test_any_layout_of_gradient(device, name, upstream):
    def gradient(output):
        if upstream == "expanded":
            return torch.ones((), device=device).expand(output.shape)
        return torch.randn_like(output).transpose(0, 1).contiguous().transpose(0, 1)

    assert_same_gradients(name, NORMS[name].arguments((3, 12, 20), device, torch.float32), gradient)


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


@pytest.mark.parametrize("name", NORMS)
def test_runs_and_kept_graphs_give_the_same_bits(device, name):
    tensors = NORMS[name].arguments((3, 12, 20), device, torch.bfloat16)
    results = []
    for _ in range(2):
        leaves = leaves_of(tensors)
        outputs = as_tuple(NORMS[name].function(*leaves))
        torch.manual_seed(1)
        upstream = upstream_of(outputs)
        kept = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
        results += [(*outputs, *kept), (*outputs, *torch.autograd.grad(outputs, leaves, upstream))]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("name", NORMS)
def test_caller_tensors_are_never_written(device, name):
    leaves = leaves_of(NORMS[name].arguments((3, 12, 20), device, torch.float32))
    outputs = as_tuple(NORMS[name].function(*leaves))
    upstream = upstream_of(outputs)
    everything = [*leaves, *outputs, *upstream]
    before = [tensor.detach().clone() for tensor in everything]
    torch.autograd.backward(outputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(everything, before))


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


@pytest.mark.parametrize("name", NORMS)
def test_a_second_derivative_is_refused(device, name):
    leaves = leaves_of(NORMS[name].arguments((3, 12, 20), device, torch.float32))
    outputs = as_tuple(NORMS[name].function(*leaves))
    upstream = [torch.ones_like(output, requires_grad=True) for output in outputs]
    (dx,) = torch.autograd.grad(outputs, leaves[:1], upstream, create_graph=True)
    function = name.split()[0]
    with pytest.raises(
        RuntimeError, match=f"gradient of {function} cannot itself be differentiated.*_reference function"
    ):
        dx.square().sum().backward()


@pytest.mark.parametrize("name", NORMS)
def test_compiled_graph_is_whole_and_takes_any_batch(device, name):
    function = NORMS[name].function
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (3, 5):
        leaves = leaves_of(NORMS[name].arguments((batch, 12, 20), device, torch.float32))
        ours, theirs = as_tuple(compiled(*leaves)), as_tuple(function(*leaves))
        upstream = upstream_of(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
        gradients = [torch.autograd.grad(outputs, leaves, upstream) for outputs in (ours, theirs)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_operators_pass_opcheck(device):
    ops, check = torch.ops.liger_trainer, torch.library.opcheck
    x, dy, token_scale = (torch.randn(4, 6, 20, device=device) for _ in range(3))
    weight, bias, channels = (torch.randn(size, device=device) for size in (20, 20, 6))
    scale = torch.randn(4, 20, device=device)
    three, one, stat = (torch.rand(size, device=device) for size in (3, 1, (4, 6)))
    dtype = torch.float32
    for tensor in (x, weight, bias, channels, scale, token_scale, three, one):
        tensor.requires_grad_()
    check(ops.fused_add_layer_norm, (x, dy, weight, bias, 1e-5, dtype))
    check(ops.modulated_rms_norm, (x, weight, scale, scale.detach() * 2, 1e-5, 0.5, "gemma"))
    check(ops.modulated_rms_norm, (x, None, token_scale.view(24, 20), None, 1e-5, 0.0, "llama"))
    check(ops.group_norm, (x, 3, channels, None, 1e-5, dtype))
    check(ops.poly_norm, (x, three, one, 1e-5))
    check(ops.dyt, (x, one, weight, bias))
    x, weight, scale, channels, three, one = (t.detach() for t in (x, weight, scale, channels, three, one))
    groups = torch.rand(4, 3, device=device)
    check(ops.fused_add_layer_norm_backward, (dy, None, x, weight, stat, stat, True, dtype, dtype))
    check(ops.modulated_rms_norm_backward, (dy, x, weight, scale, stat, 0.5, "gemma", True, True, True, dtype))
    check(ops.modulated_rms_norm_backward, (dy, x, None, scale, stat, 0.5, "gemma", False, False, True, None))
    check(ops.group_norm_backward, (dy, x, channels, groups, groups, True, dtype, None))
    check(ops.poly_norm_backward, (dy, x, three, stat, stat, stat, True, True, one))
    check(ops.dyt_backward, (dy, x, one, weight, True, True, False, dtype))
