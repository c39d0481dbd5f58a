"""RMSNorm, its sum with a residual, and LayerNorm: Hugging Face's bits, kernels, layouts, and large sizes on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.norms import launch as launch_module
from liger_trainer.kernels.norms import layer_norm as layer_norm_module
from liger_trainer.kernels.norms import rms_norm as rms_norm_module
from liger_trainer.kernels.norms.launch import NormConfig, column_sum
from liger_trainer.kernels.norms.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.norms.rms_norm import rms_norm, rms_norm_reference
from liger_trainer.kernels.parity.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from tests import aot
from tests.accuracy import assert_as_accurate, run
from tests.norm_cases import weight_gradient_errors

CASTINGS = ["llama", "gemma", "olmo2", "none"]

HF_NORMS = {
    "llama.LlamaRMSNorm": (0.0, "llama"),
    "qwen3.Qwen3RMSNorm": (0.0, "llama"),
    "mixtral.MixtralRMSNorm": (0.0, "llama"),
    "phi3.Phi3RMSNorm": (0.0, "llama"),
    "granite.GraniteRMSNorm": (0.0, "llama"),
    "glm4.Glm4RMSNorm": (0.0, "llama"),
    "gemma.GemmaRMSNorm": (1.0, "gemma"),
    "gemma2.Gemma2RMSNorm": (1.0, "gemma"),
    "gemma3.Gemma3RMSNorm": (1.0, "gemma"),
    "olmo2.Olmo2RMSNorm": (0.0, "olmo2"),
    "gpt_oss.GptOssRMSNorm": (0.0, "olmo2"),
}


@pytest.fixture(autouse=True)
def small_grid(request, monkeypatch):
    """Seeds; and a grid so small that kernels loop over several tiles of the small inputs used here."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("kernel"):
        monkeypatch.setattr(launch_module, "num_sms", lambda device: 1)


def hugging_face_norm(name, hidden_size, dtype):
    package, class_name = name.split(".")
    module = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=[class_name])
    norm = getattr(module, class_name)(hidden_size, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("name", HF_NORMS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_has_the_bits_of_the_hugging_face_module(name, dtype, weight_dtype):
    offset, casting = HF_NORMS[name]
    norm = hugging_face_norm(name, 48, weight_dtype)
    x = torch.randn(2, 5, 48, dtype=dtype, requires_grad=True)
    theirs, ours = norm(x), rms_norm_reference(x, norm.weight, 1e-5, offset, casting)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    dy = torch.randn_like(theirs)
    gradients = [torch.autograd.grad(y, (x, norm.weight), dy) for y in (theirs, ours)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("parameters", ["weight and bias", "weight", "none"])
def test_layer_norm_reference_is_torchs(parameters):
    x = torch.randn(2, 3, 24)
    weight, bias = (torch.randn(24) if name in parameters else None for name in ("weight", "bias"))
    assert torch.equal(layer_norm_reference(x, weight, bias), F.layer_norm(x, (24,), weight, bias))
    if weight is not None:  # mixed dtypes, which torch refuses on a GPU: fp32 inside, one rounding
        mixed = layer_norm_reference(x.bfloat16(), weight, bias)
        assert mixed.dtype == torch.bfloat16
        assert torch.equal(mixed, F.layer_norm(x.bfloat16().float(), (24,), weight, bias).bfloat16())


def test_fused_add_reference_is_the_two_steps():
    x, residual, weight = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    y, total = fused_add_rms_norm_reference(x, residual, weight, 1e-5, 1.0, "gemma")
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm_reference(x + residual, weight, 1e-5, 1.0, "gemma"))


@pytest.mark.parametrize("casting", CASTINGS)
def test_gradcheck_in_float64(casting):
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, 0.5, casting), (x, weight))
    assert torch.autograd.gradcheck(
        lambda x, r, w: fused_add_rms_norm(x, r, w, 1e-3, 0.5, casting), (x, residual, weight)
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x, w: rms_norm(x, w[:-1]),
            r"`weight` of rms_norm has shape \(7,\).* is 8; give .* shape \(8,\)",
        ),
        (lambda x, w: rms_norm(x, w[None]), r"`weight` of rms_norm has shape \(1, 8\)"),
        (lambda x, w: rms_norm(x, w.long()), "`weight` of rms_norm has dtype torch.int64"),
        (lambda x, w: rms_norm(x.long(), w), "`x` of rms_norm has dtype torch.int64; give a floating point tensor"),
        (lambda x, w: rms_norm(x, w.to("meta")), "`weight` of rms_norm is on meta, but `x` is on cpu"),
        (lambda x, w: rms_norm(x[:, :0], None), r"`x` of rms_norm has shape \(3, 0\).*hidden_size >= 1"),
        (lambda x, w: rms_norm(x.sum(), None), r"`x` of rms_norm has shape \(\)"),
        (lambda x, w: rms_norm(x, w, casting="lama"), "`casting` of rms_norm is 'lama'; it must be one of 'llama'"),
        (
            lambda x, w: fused_add_rms_norm(x, x[:1], w),
            r"`residual` of fused_add_rms_norm has shape torch.Size",
        ),
        (
            lambda x, w: fused_add_rms_norm(x, x.half(), w),
            "`residual` .* has dtype torch.float16, but `x` has torch",
        ),
        (lambda x, w: fused_add_rms_norm(x, x, w, casting=""), "`casting` of fused_add_rms_norm is ''"),
        (lambda x, w: layer_norm(x, w, w[1:]), r"`bias` of layer_norm has shape \(7,\)"),
    ],
)
def test_bad_arguments_get_an_error_that_names_them(function, message):
    with pytest.raises(ValueError, match=message):
        function(torch.randn(3, 8), torch.randn(8))


def train(x, residual, weight):
    y, total = fused_add_rms_norm(x, residual, weight, 1e-6, 1.0, "gemma")
    return layer_norm(rms_norm(y, weight), weight, weight) + total


def test_compiles_as_a_whole_graph_on_a_cpu():
    tensors = [torch.randn(3, 8, requires_grad=True) for _ in range(2)] + [torch.randn(8, requires_grad=True)]
    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(*tensors), train(*tensors)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, tensors, dy), torch.autograd.grad(theirs, tensors, dy))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fake_tensors_go_through_the_operators(layout, weight_dtype, monkeypatch):
    monkeypatch.setattr(launch_module, "use_triton", lambda tensor: True)  # operators; their fakes launch nothing
    with FakeTensorMode():
        shape = {"contiguous": (2, 3, 5, 16), "transposed": (2, 5, 3, 16), "slice": (2, 3, 5, 48)}[layout]
        x = torch.empty(shape, dtype=torch.bfloat16)
        x = {"contiguous": x, "transposed": x.transpose(1, 2), "slice": x[..., 16:32]}[layout].requires_grad_()
        weight = torch.empty(16, dtype=weight_dtype, requires_grad=True)
        residual = torch.empty_like(x)
        y, total = fused_add_rms_norm(x, residual, weight)
        outputs = {
            "llama": (y, torch.promote_types(x.dtype, weight_dtype)),
            "sum": (total, x.dtype),
            "gemma": (rms_norm(x, weight, casting="gemma"), x.dtype),
            "layer_norm": (layer_norm(x, weight, weight), x.dtype),
        }
        for name, (output, dtype) in outputs.items():
            assert output.dtype == dtype, name
            assert output.shape == x.shape, name
            assert output.device == x.device, name
            if layout != "slice":
                assert output.stride() == x.stride(), name
            gradients = torch.autograd.grad(output, (x, weight), torch.empty_like(output), allow_unused=name == "sum")
            assert (gradients[0].shape, gradients[0].dtype) == (x.shape, x.dtype), name
            if name != "sum":
                assert (gradients[1].shape, gradients[1].dtype) == (weight.shape, weight.dtype), name


SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def launches(hidden_size, dtype, rows=64):
    """Every launch of forward and backward of the three norms, recorded on CPU tensors."""
    x, weight = torch.zeros(rows, hidden_size, dtype=dtype), torch.zeros(hidden_size, dtype=dtype)
    stat = torch.zeros(rows)
    ops = torch.ops.liger_trainer
    with aot.recorded_launches() as recorded:
        ops.rms_norm(x, weight, 1e-6, 0.0, "llama")
        ops.rms_norm_backward(x, x, weight, stat, 0.0, "llama", True, True)
        ops.fused_add_rms_norm(x, x, weight, 1e-6, 1.0, "gemma")
        ops.fused_add_rms_norm_backward(x, x, x, weight, stat, 1.0, "gemma", True, True)
        ops.layer_norm(x, weight, weight, 1e-5, dtype)
        ops.layer_norm_backward(x, x, weight, stat, stat, True, dtype, dtype)
    return recorded


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    [(128, torch.bfloat16), (2560, torch.float16), (4096, torch.bfloat16), (16384, torch.float32)],
    ids=str,
)
def test_every_launch_compiles_and_fits(target, hidden_size, dtype, monkeypatch):
    warps = 16 if target == "gfx942" else 32
    limits = launch_module.DeviceLimits(max_warps=warps, shared_memory=SHARED_MEMORY[target])
    monkeypatch.setattr(launch_module, "device_limits", lambda device: limits)
    recorded = launches(hidden_size, dtype)
    assert len(recorded) == 9  # forward, backward and column sum of each
    for launch in recorded:
        compiled = aot.compile_launch(launch, target)
        assert launch.options["num_warps"] <= warps
        assert compiled.metadata.shared <= limits.shared_memory, launch.kernel.__name__


@pytest.mark.parametrize("variant", ["no weight", "frozen weight", "only weight", "only bias", "none casting"])
def test_variants_compile(variant, monkeypatch):
    limits = launch_module.DeviceLimits(max_warps=32, shared_memory=SHARED_MEMORY["sm_90"])
    monkeypatch.setattr(launch_module, "device_limits", lambda device: limits)
    x, stat = torch.zeros(64, 100, dtype=torch.bfloat16), torch.zeros(64)
    weight = None if variant == "no weight" else torch.zeros(100)
    casting = "none" if variant == "none casting" else "llama"
    needs_dx = variant in ("no weight", "frozen weight", "none casting")
    needs_dweight = variant in ("only weight", "none casting")
    ops = torch.ops.liger_trainer
    with aot.recorded_launches() as recorded:
        ops.rms_norm(x, weight, 1e-6, 0.0, casting)
        ops.rms_norm_backward(x.float(), x, weight, stat, 0.0, casting, needs_dx, needs_dweight)
        ops.layer_norm(x, weight, None, 1e-5, torch.float32)
        dweight_dtype = torch.float32 if needs_dweight else None
        dbias_dtype = torch.float32 if variant == "only bias" else None
        ops.layer_norm_backward(x, x, weight, stat, stat, needs_dx, dweight_dtype, dbias_dtype)
    for launch in recorded:
        aot.compile_launch(launch, "sm_90")


def test_backward_on_hopper_fetches_tiles_ahead_and_loads_vectors():
    recorded = launches(4096, torch.bfloat16)
    backward = next(launch for launch in recorded if launch.kernel.__name__ == "_rms_norm_backward_kernel")
    code = aot.compile_launch(backward, "sm_90").asm
    assert "async_copy_global_to_local" in code["ttgir"]
    assert "cp.async.cg.shared.global" in code["ptx"]  # the 16-byte copies; narrower ones are cp.async.ca
    forward = aot.compile_launch(recorded[0], "sm_90").asm
    assert "ld.global.v4" in forward["ptx"]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", [(1, 3), (5, 7), (3, 67, 128), (9, 1100), (4, 4096)], ids=str)
def test_rms_norm_is_as_accurate_as_eager(device, dtype, casting, shape):
    x = torch.randn(shape, device=device, dtype=dtype) * 2 + 0.5
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    assert_as_accurate(rms_norm, rms_norm_reference, (x, weight), offset=0.5, casting=casting)


@pytest.mark.kernel
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "hidden_size"), [(16, 256), (32, 4096), (300, 1024)])
def test_weight_gradient_is_rounded_once(device, add, rows, hidden_size):
    ours, _ = weight_gradient_errors(add, rows, hidden_size, device)
    assert ours <= 0.5


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_rms_norm_without_weight(device, dtype, casting):
    x = torch.randn(2, 9, 48, device=device, dtype=dtype)
    assert_as_accurate(rms_norm, rms_norm_reference, (x, None), casting=casting)


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
def test_layer_norm_of_one_column_is_the_bias(device):
    x = torch.randn(6, 1, device=device, requires_grad=True)
    weight, bias = (torch.randn(1, device=device, requires_grad=True) for _ in range(2))
    y = layer_norm(x, weight, bias)
    y.sum().backward()
    torch.testing.assert_close(y, bias.expand(6, 1))
    torch.testing.assert_close(x.grad, torch.zeros_like(x))
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 6.0))


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_other_configurations_give_the_same_gradients(device, monkeypatch, rows, num_stages):
    # Long rows, several a tile: their weight gradients are added up in every iteration.
    config = NormConfig(rows=rows, num_warps=8, num_stages=num_stages, programs_per_sm=2)
    monkeypatch.setattr(rms_norm_module, "backward_config", lambda hidden_size: config)
    monkeypatch.setattr(layer_norm_module, "backward_config", lambda hidden_size: config)
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


@pytest.mark.kernel
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


@pytest.mark.kernel
def test_transposed_heads_stay_where_they_lie_in_memory(device):
    x = LAYOUTS["transposed heads"](device).requires_grad_()
    y = rms_norm(x, None)
    assert y.stride() == x.stride()
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(x))
    assert dx.stride() == x.stride()


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
def test_one_tensor_as_input_and_residual(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    dy = torch.randn(4, 8, device=device)
    (ours,) = torch.autograd.grad(fused_add_rms_norm(x, x, None)[0], x, dy)
    (theirs,) = torch.autograd.grad(rms_norm_reference(x + x, None), x, dy)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.kernel
def test_gradients_not_needed_are_not_computed(device, monkeypatch):
    sums = []

    def counting_column_sum(*args):
        sums.append(args)
        column_sum(*args)

    monkeypatch.setattr(rms_norm_module, "column_sum", counting_column_sum)
    monkeypatch.setattr(layer_norm_module, "column_sum", counting_column_sum)
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


@pytest.mark.kernel
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 70), hidden_size=st.integers(1, 70), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_any_size_and_scale(rows, hidden_size, scale):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, hidden_size, device=device) * scale
    weight = torch.randn(hidden_size, device=device)
    (y, dx, dweight), upstream = run(rms_norm, (x, weight))
    truth, _ = run(rms_norm_reference, (x.double(), weight.double()), [u.double() for u in upstream])
    torch.testing.assert_close(y, truth[0].float(), rtol=1e-5, atol=1e-6)
    # Rounding errors in a row of dx are as large as rstd, even where dx itself cancels to almost 0.
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(dx / rstd, truth[1] / rstd, rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(dweight, truth[2].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.kernel
def test_squares_beyond_fp16_do_not_overflow(device):
    x = torch.full((2, 64), 6e4, device=device, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, None), torch.ones_like(x))
    assert layer_norm(x * torch.tensor([1.0, -1.0], device=device).half().repeat(32), None, None).isfinite().all()


@pytest.mark.kernel
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


@pytest.mark.kernel
@pytest.mark.parametrize("num_partials", [1, 130, 1100])
@pytest.mark.parametrize("hidden_size", [1, 70, 1200])
def test_column_sum(device, num_partials, hidden_size):
    partial = torch.randn(2, num_partials, hidden_size, device=device)
    outputs = torch.empty(hidden_size, device=device), torch.empty(hidden_size, device=device, dtype=torch.bfloat16)
    column_sum(partial, *outputs)
    truth = partial.double().sum(1)
    torch.testing.assert_close(outputs[0], truth[0].float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(outputs[1], truth[1].bfloat16(), rtol=2**-7, atol=1e-4)


@pytest.mark.kernel
def test_autocast_gives_the_dtypes_torch_gives(device):
    x, weight = torch.randn(4, 16, device=device, dtype=torch.bfloat16), torch.randn(16, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer_norm(x, weight, weight).dtype == F.layer_norm(x, (16,), weight, weight).dtype
        assert rms_norm(x, weight).dtype == torch.float32
        assert rms_norm(x, weight, 1e-6, 1.0, "gemma").dtype == torch.bfloat16


@pytest.mark.kernel
def test_rows_longer_than_a_program_holds_run_as_torch(device, monkeypatch):
    monkeypatch.setattr(launch_module, "MAX_HIDDEN_SIZE", 8)
    monkeypatch.setattr(rms_norm_module, "_rms_norm_forward_kernel", None)
    x = torch.randn(3, 9, device=device)
    assert torch.equal(rms_norm(x, None), rms_norm_reference(x, None))


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
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


OPERATORS = {
    "rms_norm": (rms_norm, rms_norm_reference),
    "fused_add_rms_norm": (fused_add_rms_norm, fused_add_rms_norm_reference),
    "layer_norm": (layer_norm, layer_norm_reference),
}


def inputs(name, rows, hidden_size, device, dtype=torch.bfloat16):
    """Leaves in the order of the function's arguments, and upstream gradients of its outputs."""
    x = torch.randn(rows, hidden_size, device=device, dtype=dtype)
    weight = torch.randn(hidden_size, device=device, dtype=dtype)
    tensors = {
        "rms_norm": (x, weight),
        "fused_add_rms_norm": (x, torch.randn_like(x), weight),
        "layer_norm": (x, weight, torch.randn_like(weight)),
    }[name]
    upstream = [torch.randn_like(x) for _ in range(2 if name == "fused_add_rms_norm" else 1)]
    return [tensor.requires_grad_() for tensor in tensors], upstream


def outputs_and_gradients(function, leaves, upstream):
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(16384, 4096), (655360, 128), (16384, 16384), (70001, 2560), (3, 65536)], ids=str)
def test_real_shapes_are_as_accurate_as_eager(device, name, shape):
    function, reference = OPERATORS[name]
    leaves, upstream = inputs(name, shape[0], shape[1], device)
    ours = outputs_and_gradients(function, leaves, upstream)
    eager = outputs_and_gradients(reference, leaves, upstream)
    exact_leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    truth = outputs_and_gradients(reference, exact_leaves, [dy.float() for dy in upstream])
    for index, (our, their, exact) in enumerate(zip(ours, eager, truth)):
        our_error, their_error = (torch.linalg.vector_norm(result.float() - exact) for result in (our, their))
        assert our_error <= 1.1 * their_error + 1e-6 * torch.linalg.vector_norm(exact), f"result {index}"


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "hidden_size"), [(16, 256), (32, 4096), (8192, 4096)])
def test_weight_gradient_is_rounded_once_and_eager_is_further_off(device, add, rows, hidden_size, record_property):
    """Liger's test_norm_lora_parity compares with eager, which rounds x_hat and every product."""
    ours, eager = weight_gradient_errors(add, rows, hidden_size, device)
    record_property("bf16 units off", f"ours {ours:.2f}, eager {eager:.2f}")
    print(f"{rows}x{hidden_size} add={add}: bf16 units off float64: ours {ours:.2f}, eager {eager:.2f}")
    assert ours <= 0.5
    assert eager > 1.0


@pytest.mark.gpu
def test_more_than_2_to_the_31_numbers(device):
    rows, hidden_size = 2**19 + 64, 4096
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    x = torch.empty(rows, hidden_size, device=device, dtype=torch.bfloat16).normal_()
    weight = torch.randn(hidden_size, device=device, dtype=torch.bfloat16)
    dy = torch.empty_like(x).normal_()
    for name in ("rms_norm", "layer_norm"):
        function, reference = OPERATORS[name]
        parameters = (weight,) if name == "rms_norm" else (weight, weight)
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]
        y, dx, *parameter_gradients = outputs_and_gradients(function, leaves, [dy])
        sums = [torch.zeros(hidden_size, device=device) for _ in parameters]
        for start in range(0, rows, 2**16):
            rows_of = slice(start, start + 2**16)
            part = [tensor.detach().float().requires_grad_() for tensor in (x[rows_of], *parameters)]
            part_y, part_dx, *part_gradients = outputs_and_gradients(reference, part, [dy[rows_of].float()])
            torch.testing.assert_close(y[rows_of].float(), part_y, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(dx[rows_of].float(), part_dx, rtol=2e-2, atol=2e-2)
            for total, gradient in zip(sums, part_gradients):
                total += gradient
        for total, gradient in zip(sums, parameter_gradients):
            assert torch.linalg.vector_norm(gradient.float() - total) <= 4e-3 * torch.linalg.vector_norm(total)
        del y, dx


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(device):
    kernels = (
        rms_norm_module._rms_norm_forward_kernel,
        rms_norm_module._rms_norm_backward_kernel,
        layer_norm_module._layer_norm_forward_kernel,
        layer_norm_module._layer_norm_backward_kernel,
    )
    counts = set()
    for rows in (7, 1, 16, 4096, 100003):
        for name, (function, _) in OPERATORS.items():
            outputs_and_gradients(function, *inputs(name, rows, 192, device))
        counts.add(tuple(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels))
    assert len(counts) == 1, counts


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_inductor_takes_the_operators_into_one_graph(device, name):
    function, _ = OPERATORS[name]
    leaves, upstream = inputs(name, 64, 512, device)

    def after_a_matmul(x, *rest):
        return function(F.silu(x) * 2, *rest)

    compiled = outputs_and_gradients(torch.compile(after_a_matmul, fullgraph=True), leaves, upstream)
    plain = outputs_and_gradients(after_a_matmul, leaves, upstream)
    for ours, theirs in zip(compiled, plain):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
