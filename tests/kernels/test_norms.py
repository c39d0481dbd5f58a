"""The norms without a GPU: references against Hugging Face's modules, graphs, errors, and compilation for four GPUs."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_trainer.kernels.norms import launch as _norm_common
from liger_trainer.kernels.norms.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.norms.rms_norm import rms_norm, rms_norm_reference
from liger_trainer.kernels.parity.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from tests import aot

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
def seed():
    torch.manual_seed(0)


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
    assert torch.autograd.gradcheck(layer_norm, (x, weight, weight.detach().clone().requires_grad_()))


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
    monkeypatch.setattr(_norm_common, "use_triton", lambda tensor: True)  # operators; their fakes launch nothing
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
    limits = _norm_common.DeviceLimits(max_warps=warps, shared_memory=SHARED_MEMORY[target])
    monkeypatch.setattr(_norm_common, "device_limits", lambda device: limits)
    recorded = launches(hidden_size, dtype)
    assert len(recorded) == 9  # forward, backward and column sum of each
    for launch in recorded:
        compiled = aot.compile_launch(launch, target)
        assert launch.options["num_warps"] <= warps
        assert compiled.metadata.shared <= limits.shared_memory, launch.kernel.__name__


@pytest.mark.parametrize("variant", ["no weight", "frozen weight", "only weight", "only bias", "none casting"])
def test_variants_compile(variant, monkeypatch):
    limits = _norm_common.DeviceLimits(max_warps=32, shared_memory=SHARED_MEMORY["sm_90"])
    monkeypatch.setattr(_norm_common, "device_limits", lambda device: limits)
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
