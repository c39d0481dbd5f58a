"""RMSNorm, fused residual add and LayerNorm as Triton kernels: values, gradients, layouts, dtypes and the operators.

`tests.accuracy` says how exact a result must be.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.norms import launch as _norm_common
from liger_trainer.kernels.norms import layer_norm as _layer_norm_kernels
from liger_trainer.kernels.norms import rms_norm as _rms_norm_kernels
from liger_trainer.kernels.norms.launch import NormConfig, column_sum
from liger_trainer.kernels.norms.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.norms.rms_norm import rms_norm, rms_norm_reference
from liger_trainer.kernels.parity.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from tests.accuracy import assert_as_accurate, run
from tests.norm_cases import weight_gradient_errors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASTINGS = ["llama", "gemma", "olmo2", "none"]


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Few programs, so that each loops over several tiles of the small inputs used here."""
    monkeypatch.setattr(_rms_norm_kernels, "num_sms", lambda device: 1)
    monkeypatch.setattr(_layer_norm_kernels, "num_sms", lambda device: 1)
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", [(1, 3), (5, 7), (3, 67, 128), (9, 1100), (4, 4096)], ids=str)
def test_rms_norm_is_as_accurate_as_eager(device, dtype, casting, shape):
    x = torch.randn(shape, device=device, dtype=dtype) * 2 + 0.5
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    assert_as_accurate(rms_norm, rms_norm_reference, (x, weight), offset=0.5, casting=casting)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "hidden_size"), [(16, 256), (32, 4096), (300, 1024)])
def test_weight_gradient_is_rounded_once(device, add, rows, hidden_size):
    ours, _ = weight_gradient_errors(add, rows, hidden_size, device)
    assert ours <= 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_rms_norm_without_weight(device, dtype, casting):
    x = torch.randn(2, 9, 48, device=device, dtype=dtype)
    assert_as_accurate(rms_norm, rms_norm_reference, (x, None), casting=casting)


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_weight_of_another_dtype(device, casting, x_dtype, weight_dtype):
    x = torch.randn(33, 64, device=device, dtype=x_dtype)
    weight = torch.randn(64, device=device, dtype=weight_dtype)
    assert_as_accurate(rms_norm, rms_norm_reference, (x, weight), casting=casting)
    residual = torch.randn_like(x)
    assert_as_accurate(fused_add_rms_norm, fused_add_rms_norm_reference, (x, residual, weight), casting=casting)
    assert_as_accurate(layer_norm, layer_norm_reference, (x, weight, weight.flip(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("casting", "offset"),
    [("llama", 0.0), ("llama", 0.3125), ("gemma", 1.0), ("olmo2", 0.0), ("olmo2", 0.3125), ("none", 0.3125)],
)
def test_forward_has_the_bits_of_the_model_formula(device, dtype, casting, offset):
    # The squares of small integers add up exactly in any order, so only the formula's roundings are left. (64 rows:
    # torch's bf16 rsqrt on a CPU rounds twice in what is left over after whole vectors.)
    x = torch.randint(-9, 10, (64, 128), device=device).to(dtype)
    weight = torch.randn(128, device=device, dtype=dtype)
    ours = rms_norm(x, weight, 1e-6, offset, casting)
    theirs = rms_norm_reference(x, weight, 1e-6, offset, casting)
    allowed = 0 if device == "cpu" else 0.001  # a GPU's rsqrt is approximate
    assert (ours != theirs).double().mean().item() <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", [(1, 3), (3, 41, 100), (5, 2048)], ids=str)
def test_fused_add_is_as_accurate_as_eager(device, dtype, casting, shape):
    x, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    tensors = (x, residual, weight)
    assert_as_accurate(fused_add_rms_norm, fused_add_rms_norm_reference, tensors, offset=1.0, casting=casting)
    _, total = fused_add_rms_norm(*tensors)
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (3, 67, 128), (9, 1100), (4, 4096)], ids=str)
@pytest.mark.parametrize("parameters", ["weight and bias", "weight", "bias", "none"])
def test_layer_norm_is_as_accurate_as_eager(device, dtype, shape, parameters):
    x = torch.randn(shape, device=device, dtype=dtype) * 2 + 3
    weight, bias = (
        torch.randn(shape[-1], device=device, dtype=dtype) if name in parameters else None
        for name in ("weight", "bias")
    )
    assert_as_accurate(layer_norm, layer_norm_reference, (x, weight, bias))


def test_layer_norm_of_one_column_is_the_bias(device):
    x = torch.randn(6, 1, device=device, requires_grad=True)
    weight, bias = (torch.randn(1, device=device, requires_grad=True) for _ in range(2))
    y = layer_norm(x, weight, bias)
    y.sum().backward()
    torch.testing.assert_close(y, bias.expand(6, 1))
    torch.testing.assert_close(x.grad, torch.zeros_like(x))
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 6.0))


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_other_configurations_give_the_same_gradients(device, monkeypatch, rows, num_stages):
    # Long rows, several a tile: their weight gradients are added up in every iteration.
    config = NormConfig(rows=rows, num_warps=8, num_stages=num_stages, programs_per_sm=2)
    monkeypatch.setattr(_rms_norm_kernels, "backward_config", lambda hidden_size, device: config)
    monkeypatch.setattr(_layer_norm_kernels, "backward_config", lambda hidden_size, device: config)
    x, residual = (torch.randn(19, 1100, device=device) for _ in range(2))
    weight, bias = (torch.randn(1100, device=device) for _ in range(2))
    assert_as_accurate(fused_add_rms_norm, fused_add_rms_norm_reference, (x, residual, weight))
    assert_as_accurate(layer_norm, layer_norm_reference, (x, weight, bias))


LAYOUTS = {
    "transposed heads": lambda d: torch.randn(2, 5, 3, 16, device=d).transpose(1, 2),
    "slice of fused qkv": lambda d: torch.randn(2, 5, 48, device=d)[..., 16:32],
    "heads of a slice": lambda d: torch.randn(2, 5, 96, device=d)[..., :32].view(2, 5, 2, 16).transpose(1, 2),
    "strided columns": lambda d: torch.randn(4, 16, 5, device=d).transpose(1, 2)[..., ::2],
    "expanded": lambda d: torch.randn(1, 16, device=d).expand(6, 16),
    "one row": lambda d: torch.randn(16, device=d),
    "strided row": lambda d: torch.randn(32, device=d)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("upstream_layout", ["contiguous", "as x", "expanded"])
def test_any_layout_of_input_and_gradient(device, layout, upstream_layout):
    x = LAYOUTS[layout](device)
    weight, bias = (torch.randn(x.shape[-1], device=device) for _ in range(2))
    dy = torch.randn_like(x) if upstream_layout == "as x" else torch.randn(x.shape, device=device)
    if upstream_layout == "expanded":
        dy = torch.randn((), device=device).expand(x.shape)
    for function, reference, tensors in (
        (rms_norm, rms_norm_reference, (x, weight)),
        (lambda x, w: fused_add_rms_norm(x, x * 2, w)[0], lambda x, w: rms_norm_reference(x * 3, w), (x, weight)),
        (layer_norm, layer_norm_reference, (x, weight, bias)),
    ):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        y, truth = function(*leaves), reference(*leaves)
        torch.testing.assert_close(y, truth)
        ours, theirs = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(truth, leaves, dy)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_transposed_heads_stay_where_they_lie_in_memory(device):
    x = LAYOUTS["transposed heads"](device).requires_grad_()
    y = rms_norm(x, None)
    assert y.stride() == x.stride()
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(x))
    assert dx.stride() == x.stride()


def test_saved_tensors_may_come_back_in_another_layout(device):
    x = LAYOUTS["transposed heads"](device).requires_grad_()
    weight = torch.randn(16, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.contiguous().clone(), lambda t: t
    )  # as offloading does
    for function, reference in ((rms_norm, rms_norm_reference), (partial_layer_norm, partial_layer_norm_reference)):
        with hooks:
            y = function(x, weight)
        truth = torch.autograd.grad(reference(x, weight), (x, weight), dy)
        torch.testing.assert_close(torch.autograd.grad(y, (x, weight), dy), truth, rtol=1e-4, atol=1e-5)


def partial_layer_norm(x, weight):
    return layer_norm(x, weight, None)


def partial_layer_norm_reference(x, weight):
    return layer_norm_reference(x, weight, None)


def test_caller_tensors_are_never_written(device):
    tensors = [torch.randn(9, 24, device=device) for _ in range(2)] + [torch.randn(24, device=device)]
    before = copy.deepcopy(tensors)
    upstream = [torch.randn(9, 24, device=device) for _ in range(2)]
    upstream_before = copy.deepcopy(upstream)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    torch.autograd.backward(fused_add_rms_norm(*leaves), upstream)
    torch.autograd.backward([rms_norm(leaves[0], leaves[2])], upstream[:1])
    torch.autograd.backward([layer_norm(leaves[0], leaves[2], None)], upstream[:1])
    assert all(torch.equal(a, b) for a, b in zip(tensors + upstream, before + upstream_before))


@pytest.mark.parametrize("used", ["y", "residual", "both"])
def test_fused_add_with_either_output_unused(device, used):
    x, residual = (torch.randn(7, 40, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(40, device=device, requires_grad=True)
    dy, dtotal = torch.randn(7, 40, device=device), torch.randn(7, 40, device=device)

    def gradients(function):
        y, total = function(x, residual, weight)
        loss = torch.zeros((), device=device)
        if used in ("y", "both"):
            loss = loss + (y * dy).sum()
        if used in ("residual", "both"):
            loss = loss + (total * dtotal).sum()
        return torch.autograd.grad(loss, (x, residual, weight), allow_unused=True)

    ours, theirs = gradients(fused_add_rms_norm), gradients(fused_add_rms_norm_reference)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-4, atol=1e-5)
    if used == "residual":
        assert ours[2] is None
    else:
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-5)


def test_the_two_gradients_of_fused_add_are_separate_once_accumulated(device):
    x, residual = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    y, total = fused_add_rms_norm(x, residual, None)
    loss = (y * total).sum()
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()  # accumulates in place
    torch.testing.assert_close(x.grad, 2 * once)
    torch.testing.assert_close(residual.grad, 2 * once)
    assert x.grad is not None
    x.grad.zero_()
    torch.testing.assert_close(residual.grad, 2 * once)


def test_one_tensor_as_input_and_residual(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    dy = torch.randn(4, 8, device=device)
    (ours,) = torch.autograd.grad(fused_add_rms_norm(x, x, None)[0], x, dy)
    (theirs,) = torch.autograd.grad(rms_norm_reference(x + x, None), x, dy)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_not_needed_are_not_computed(device, monkeypatch):
    sums = []

    def counting_column_sum(*args):
        sums.append(args)
        column_sum(*args)

    monkeypatch.setattr(_rms_norm_kernels, "column_sum", counting_column_sum)
    monkeypatch.setattr(_layer_norm_kernels, "column_sum", counting_column_sum)
    x, frozen = torch.randn(6, 32, device=device), torch.randn(32, device=device)
    dy = torch.randn(6, 32, device=device)
    needs_grad = x.clone().requires_grad_()
    for function, reference in (
        (lambda x, w: rms_norm(x, w), lambda x, w: rms_norm_reference(x, w)),
        (lambda x, w: fused_add_rms_norm(x, dy, w)[0], lambda x, w: rms_norm_reference(x + dy, w)),
        (lambda x, w: layer_norm(x, w, frozen), lambda x, w: layer_norm_reference(x, w, frozen)),
    ):
        (dx,) = torch.autograd.grad(function(needs_grad, frozen), needs_grad, dy)
        torch.testing.assert_close(dx, torch.autograd.grad(reference(needs_grad, frozen), needs_grad, dy)[0])
        assert not sums, "a frozen weight needs no weight-gradient sum"
        weight = frozen.clone().requires_grad_()  # and frozen hidden states with a trainable weight
        (dweight,) = torch.autograd.grad(function(x, weight), weight, dy)
        torch.testing.assert_close(dweight, torch.autograd.grad(reference(x, weight), weight, dy)[0])
        sums.clear()
    bias = frozen.clone().requires_grad_()
    (dbias,) = torch.autograd.grad(layer_norm(x, frozen, bias), bias, dy)
    torch.testing.assert_close(dbias, dy.sum(0))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)], ids=str)
def test_empty_inputs(device, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    weight, bias = (torch.randn(16, device=device, requires_grad=True) for _ in range(2))
    for y in (rms_norm(x, weight), *fused_add_rms_norm(x, x, weight), layer_norm(x, weight, bias)):
        assert y.shape == shape
        gradients = torch.autograd.grad(y.sum(), (x, weight, bias), allow_unused=True)
        assert gradients[0].shape == shape
        assert not any(gradient.count_nonzero() for gradient in gradients if gradient is not None)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 70), hidden_size=st.integers(1, 70), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_any_size_and_scale(rows, hidden_size, scale):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, hidden_size, device=device) * scale
    weight = torch.randn(hidden_size, device=device)
    (y, dx, dweight), upstream = run(rms_norm, (x, weight))
    truth, _ = run(rms_norm_reference, (x.double(), weight.double()), [u.double() for u in upstream])
    torch.testing.assert_close(y, truth[0].float(), rtol=1e-5, atol=1e-6)
    # What cancels in a row of dx is as large as rstd, whatever little is left of it.
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(dx / rstd, truth[1] / rstd, rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(dweight, truth[2].float(), rtol=1e-4, atol=1e-5)


def test_squares_beyond_fp16_do_not_overflow(device):
    x = torch.full((2, 64), 6e4, device=device, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, None), torch.ones_like(x))
    assert layer_norm(x * torch.tensor([1.0, -1.0], device=device).half().repeat(32), None, None).isfinite().all()


def test_nan_stays_in_its_row(device):
    x = torch.randn(70, 64, device=device)
    x[3, 5] = float("nan")
    x.requires_grad_()
    others = torch.arange(70, device=device) != 3
    for y in (rms_norm(x, None), layer_norm(x, None, None)):
        (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
        assert y[3].isnan().all()
        assert y[others].isfinite().all()
        assert dx[others].isfinite().all()


def test_runs_give_the_same_bits(device):
    x, weight = torch.randn(300, 64, device=device), torch.randn(64, device=device)
    first, upstream = run(rms_norm, (x, weight))
    second, _ = run(rms_norm, (x, weight), upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("num_partials", [1, 130, 1100])
@pytest.mark.parametrize("hidden_size", [1, 70, 1200])
def test_column_sum(device, num_partials, hidden_size):
    partial = torch.randn(2, num_partials, hidden_size, device=device)
    outputs = torch.empty(hidden_size, device=device), torch.empty(hidden_size, device=device, dtype=torch.bfloat16)
    column_sum(partial, *outputs)
    truth = partial.double().sum(1)
    torch.testing.assert_close(outputs[0], truth[0].float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(outputs[1], truth[1].bfloat16(), rtol=2**-7, atol=1e-4)


def test_autocast_gives_the_dtypes_torch_gives(device):
    x, weight = torch.randn(4, 16, device=device, dtype=torch.bfloat16), torch.randn(16, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer_norm(x, weight, weight).dtype == F.layer_norm(x, (16,), weight, weight).dtype
        assert rms_norm(x, weight).dtype == torch.float32
        assert rms_norm(x, weight, 1e-6, 1.0, "gemma").dtype == torch.bfloat16


def test_rows_longer_than_a_program_holds_run_as_torch(device, monkeypatch):
    monkeypatch.setattr(_norm_common, "MAX_HIDDEN_SIZE", 8)
    monkeypatch.setattr(_rms_norm_kernels, "_rms_norm_forward_kernel", None)
    x = torch.randn(3, 9, device=device)
    assert torch.equal(rms_norm(x, None), rms_norm_reference(x, None))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device, use_reentrant):
    x, weight = (
        torch.randn(6, 16, device=device, requires_grad=True),
        torch.randn(16, device=device, requires_grad=True),
    )
    y, total = checkpoint(fused_add_rms_norm, x, x * 2, weight, use_reentrant=use_reentrant)
    (y * total).sum().backward()
    y, total = fused_add_rms_norm_reference(x, x * 2, weight)
    theirs = torch.autograd.grad((y * total).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "transposed heads", "heads of a slice"])
@pytest.mark.parametrize("with_weight", [True, False])
def test_operators_pass_opcheck(device, layout, with_weight):
    x = torch.randn(3, 16, device=device) if layout == "contiguous" else LAYOUTS[layout](device)
    x = x.detach().requires_grad_()
    weight = torch.randn(16, device=device, requires_grad=True) if with_weight else None
    ops = torch.ops.liger_trainer
    torch.library.opcheck(ops.rms_norm, (x, weight, 1e-6, 0.0, "llama"))
    torch.library.opcheck(ops.fused_add_rms_norm, (x, x.detach() * 2, weight, 1e-6, 1.0, "gemma"))
    torch.library.opcheck(ops.layer_norm, (x, weight, weight, 1e-5, torch.float32))
    x, weight = x.detach(), None if weight is None else weight.detach()
    rstd = x.new_empty(x.shape).uniform_()[..., 0]
    flags = (True, with_weight)
    torch.library.opcheck(ops.rms_norm_backward, (x, x, weight, rstd, 0.0, "llama", *flags))
    torch.library.opcheck(ops.fused_add_rms_norm_backward, (x, None, x, weight, rstd, 0.0, "llama", *flags))
    dtype = torch.float32 if with_weight else None
    torch.library.opcheck(ops.layer_norm_backward, (x, x, weight, rstd, rstd, True, dtype, dtype))


def test_compiled_graph_is_whole_and_takes_any_batch(device):
    def block(x, residual, weight):
        y, total = fused_add_rms_norm(x, residual, weight)
        return layer_norm(rms_norm(y, weight, 1e-6, 1.0, "gemma").transpose(0, 1), weight, None).sum() + total.sum()

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(16, device=device, requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (3, 5, 8):
            x, residual = (torch.randn(batch, 4, 16, device=device, requires_grad=True) for _ in range(2))
            ours = torch.autograd.grad(compiled(x, residual, weight), (x, residual, weight))
            theirs = torch.autograd.grad(block(x, residual, weight), (x, residual, weight))
            torch.testing.assert_close(ours, theirs)
