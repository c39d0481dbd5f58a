"""Which devices Triton drives, by the names that torch gives them, and what is asked of them."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from liger_trainer.compat.rebound import _global_names
from liger_trainer.kernels import runtime
from liger_trainer.kernels.rows import device_limits


def tensor_on(device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Stands in for a tensor on a device that this machine does not have."""
    return types.SimpleNamespace(device=torch.device(device), dtype=dtype)  # type: ignore[return-value]


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu", "xpu:1"])  # a ROCm device is called "cuda" by torch
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_triton_runs_on_nvidia_amd_and_intel_gpus(device: str, dtype: torch.dtype) -> None:
    assert runtime.use_triton(tensor_on(device, dtype))


@pytest.mark.parametrize("device", ["cpu", "mps", "meta", "hpu", "privateuseone"])
def test_elsewhere_the_reference_runs(device: str) -> None:
    assert not runtime.use_triton(tensor_on(device)) or (device == "cpu" and runtime.INTERPRETED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_run_as_the_reference(dtype: torch.dtype) -> None:
    assert not runtime.use_triton(tensor_on("cuda", dtype))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_tensors_device_becomes_the_current_one(kind: str) -> None:
    with mock.patch.object(torch, kind) as module:
        module.current_device.return_value = 1
        assert runtime.on_device(tensor_on(f"{kind}:2")) is module.device.return_value
        module.device.assert_called_once_with(torch.device(f"{kind}:2"))
        runtime.on_device(tensor_on(f"{kind}:1"))
        assert module.device.call_count == 1


def test_size_of_a_persistent_grid() -> None:
    properties = types.SimpleNamespace(multi_processor_count=132, gpu_subslice_count=64)
    for kind, expected in (("cuda", 132), ("xpu", 64), ("cpu", 8)):
        with mock.patch.object(torch, kind, get_device_properties=lambda device: properties):
            assert runtime.num_sms.__wrapped__(torch.device(kind)) == expected


def test_limits_of_an_amd_gpu_have_its_wider_warps() -> None:
    properties = types.SimpleNamespace(warp_size=64, shared_memory_per_block_optin=65536)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        assert device_limits.__wrapped__(torch.device("cuda"))[:2] == (16, 65536)
    assert device_limits(torch.device("xpu")).max_warps == 16


def test_expanded_tensors_share_memory_unless_they_are_empty():
    assert runtime.is_expanded(torch.randn(1, 3).expand(2, 3))
    assert not runtime.is_expanded(torch.randn(2, 3))
    assert not runtime.is_expanded(torch.randn(1, 3).expand(1, 3))
    assert not runtime.is_expanded(torch.empty_strided((2, 0, 1), (0, 1, 1)))


def _is_kernel(x):
    return True


def _by_all(values):
    return "kernel" if all(_is_kernel(x) for x in values) else "torch"


def test_a_reference_runs_torch_where_a_generator_asks():
    assert _by_all([1]) == "kernel"
    assert runtime.reference_of(_by_all, "_is_kernel")([1]) == "torch"


def test_no_reference_reads_what_it_replaces():
    """A comparison with a reference that asks for a kernel compares the kernel with itself."""
    folder, references = Path(runtime.__file__).parent, 0
    for file in sorted(folder.rglob("*.py")):
        if "sweeps" in file.parts or file.stem == "__init__":
            continue
        module = importlib.import_module(
            "liger_trainer.kernels." + ".".join(file.relative_to(folder).with_suffix("").parts)
        )
        for name, function in vars(module).items():
            if hasattr(function, "rebound_from"):
                _, replaced = function.rebound_from
                assert not {*replaced} & {*_global_names(function.__code__)}, f"{name} in {file}"
                references += 1
    assert references > 40


def test_a_table_that_is_on_a_device_is_not_pinned():
    """So are tables that are made where a device is torch's default, as in a proof."""

    class Table:
        device = torch.device("cuda")

        def to(self, device, non_blocking):
            return device.type, non_blocking

        def pin_memory(self):
            raise RuntimeError("cannot pin 'torch.cuda.IntTensor' only dense CPU tensors can be pinned")

    assert runtime.sent(Table(), torch.device("cuda")) == ("cuda", True)
