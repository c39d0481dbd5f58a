"""How a head's weight gradient is summed over chunks, and its kernel compiled for every GPU."""

import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton

from liger_trainer.kernels.head import weight_gradient
from liger_trainer.kernels.head.weight_gradient import (
    MAX_HALF_CHUNKS,
    WeightGradientSum,
    hopper_launch,
    launch,
    launch_for,
)
from tests.aot import TARGETS, compile_launch, recorded_launches


def chunk(tokens, vocab_size, hidden_size, dtype, device="cpu"):
    return (
        torch.randn(tokens, vocab_size, device=device).to(dtype),
        torch.randn(tokens, hidden_size, device=device).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunks", [1, 2, MAX_HALF_CHUNKS + 1])
def test_sum_over_chunks(dtype, chunks, device):
    torch.manual_seed(0)
    parts = [chunk(5, 24, 16, dtype, device) for _ in range(chunks)]
    exact = sum(left.double().t() @ right.double() for left, right in parts)
    total = WeightGradientSum(torch.full((24, 16), float("nan"), dtype=dtype, device=device), chunks)
    for left, right in parts:
        total.add(left, right)
    total.finish()
    error = (total.weight_gradient.double() - exact).norm() / exact.norm()
    rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    # One rounding a chunk while the sum is half precision, one in all where it is kept in fp32.
    assert error <= rounding * (chunks**0.5 if chunks <= MAX_HALF_CHUNKS else 1)


def test_memory_of_the_sum():
    """In dW itself, but in an fp32 tensor where a half-precision sum would round too often."""
    for dtype, chunks, own in (
        (torch.bfloat16, 1, True),
        (torch.bfloat16, MAX_HALF_CHUNKS, True),
        (torch.bfloat16, MAX_HALF_CHUNKS + 1, False),
        (torch.float16, MAX_HALF_CHUNKS + 1, False),
        (torch.float64, 99, True),
    ):
        total = WeightGradientSum(torch.empty(4, 4, dtype=dtype), chunks)
        assert (total.total is total.weight_gradient) == own
        assert total.launch is None


def test_every_chunk_is_added():
    total = WeightGradientSum(torch.empty(8, 8), 2)
    total.add(*chunk(3, 8, 8, torch.float32))
    with pytest.raises(AssertionError, match="every chunk"):
        total.finish()


def kernel_for(capability, version=triton.__version__):
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", None),
        mock.patch.object(triton, "__version__", version),
    ):
        return launch_for.__wrapped__(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), None),
        ((9, 0), hopper_launch()),
        ((10, 0), launch),
        ((10, 3), launch),
        ((12, 0), None),
    ],
)
def test_kernel_of_a_device(capability, expected):
    assert kernel_for(capability) is expected


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_every_triton_of_the_constraints_runs_the_kernel_for_hopper(version):
    assert kernel_for((9, 0), version) is hopper_launch()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_a_triton_that_was_not_tried_leaves_hopper_to_the_plain_kernel(version):
    assert kernel_for((9, 0), version) is launch


def test_without_gluon_there_is_no_kernel_for_hopper():
    with mock.patch.dict(sys.modules, {"liger_trainer.kernels.head.weight_gradient_gluon": None}):
        assert hopper_launch() is None


def launches_of(kernel, dtype):
    with mock.patch.object(weight_gradient, "launch_for", return_value=kernel), recorded_launches() as launches:
        total = WeightGradientSum(torch.empty(256, 512, dtype=dtype), 3)
        assert total.launch is not None
        for _ in range(3):
            total.add(*chunk(64, 256, 512, dtype))
    assert [(recorded.arguments["ADD"], recorded.arguments["KEEP"]) for recorded in launches] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    return launches


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("sm_")])
def test_compiles_ahead_of_time(target):
    launches = launches_of(launch, torch.bfloat16)
    for recorded in launches if target == "sm_90" else launches[1:2]:
        assert compile_launch(recorded, target)


def test_kernel_uses_the_tensor_cores_and_the_copy_engine():
    assembly = compile_launch(launches_of(launch, torch.float16)[1], "sm_90").asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in assembly
    assert "cp.async.bulk.tensor.2d.shared" in assembly
    assert "cp.async.bulk.tensor.2d.global" in assembly
    assert "cvt.rn.f32.s" not in assembly  # an eighth of the speed of the additions used instead


@pytest.mark.skipif(hopper_launch() is None, reason="the kernel for Hopper is not written for this Triton's Gluon")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("state", [0, 1, 2], ids=["first", "middle", "last"])
def test_hopper_kernel_compiles_ahead_of_time(state, dtype, tmp_path):
    torch_dtype = torch.float16 if dtype == "f16" else torch.bfloat16
    compiled = compile_launch(launches_of(hopper_launch(), torch_dtype)[state], "sm_90")
    assembly = compiled.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n256k16.f32.{dtype}.{dtype}" in assembly
    assert re.search(r"setmaxnreg\.inc\S+\s+232;", assembly)  # a consumer's, above what all warps start with
    assert re.search(r"setmaxnreg\.dec\S+\s+40;", assembly)  # the producer's
    assert "cp.async.bulk.tensor.2d.shared" in assembly
    assert "cp.async.bulk.tensor.2d.global" in assembly
    assert compiled.metadata.shared <= 227 * 1024
    if not os.access(cuobjdump := triton.knobs.nvidia.cuobjdump.path, os.X_OK):
        return
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [cuobjdump, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage  # nothing spills
