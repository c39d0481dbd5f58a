"""A pytest plugin: `liger_kernel`, imported by Liger's own tests, is made of the names of liger_trainer.

Names are found in the table of `liger_trainer.liger.modules`. `_NAMES` has what only Liger's tests call. A test that
uses a name of `_ABSENT` is skipped.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import inspect
import math
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from liger_trainer import functional, losses, nn
from liger_trainer.liger import modules
from tests.peers.liger_table import DIFFERENCES, TESTS_NOT_APPLICABLE

# Tests of these compare Liger's functions with Liger's autograd.Functions; those of the modules compare with torch.
_PAIRED = (
    *("liger_dyt", "liger_fused_add_rms_norm", "liger_fused_linear_jsd", "liger_geglu", "liger_jsd"),
    *("liger_layer_norm", "liger_modulated_rms_norm", "liger_poly_norm", "liger_qwen2vl_mrope"),
    *("liger_rms_norm", "liger_rope"),
    *("LigerCrossEntropyFunction", "LigerDyTFunction", "LigerFusedLinearJSDFunction", "LigerFusedLinearKLDivFunction"),
    *("LigerGELUMulFunction", "LigerJSDFunction", "LigerModulatedRMSNormFunction", "LigerPolyNormFunction"),
    *("LigerQwen2VLMRopeFunction", "LigerRopeFunction"),
)
_PRIVATE = (
    *("LigerFusedLinearPPOBase", "_reduce_grpo_loss", "_sparsemax_backward_kernel", "_sparsemax_forward_kernel"),
    *("calculate_settings", "compute_routing_metadata", "liger_cross_entropy_kernel"),
)
_ABSENT = dict.fromkeys(_PAIRED, "Liger's function beside Liger's Function") | dict.fromkeys(_PRIVATE, "Liger's inside")

_LARGEST_ON_CPU = 2**24


class _Absent:
    def __init__(self, name: str) -> None:
        self._reason = f"{name}: {_ABSENT[name]}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(self._reason)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(self._reason)

    __getitem__ = __call__  # a Triton kernel is launched with kernel[grid](...)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, **options):
    return _ADAPTED["LigerCrossEntropyLoss"](weight=weight, ignore_index=ignore_index, **options)(input, target)


def _gamma_weights(advantages, **arguments):
    from trl import GRPOTrainer

    arguments = {"importance_sampling_ratio": None} | arguments
    return GRPOTrainer.get_gamma_weights(advantages=advantages.reshape(-1, 1), **arguments)


_NAMES: dict[str, Any] = {
    "available_backends": lambda operation: ["triton"],
    "liger_cross_entropy": _cross_entropy,
    "get_gamma_weights": _gamma_weights,
}


def _cast_to_input(loss: type) -> type:
    """`loss` whose results have the dtype of the logits, as Liger's have; ours are fp32."""

    class Loss(loss):
        def forward(self, _input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(_input, *args, **kwargs)
            if not isinstance(result, functional.CrossEntropyOutput):
                return result.to(_input.dtype)
            values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
            floats = {key: None if value is None else value.to(_input.dtype) for key, value in values.items()}
            return functional.CrossEntropyOutput(**floats | {"predicted_tokens": values["predicted_tokens"]})

    return Loss


def _with_logits_of_all_tokens(loss: type) -> type:
    """`loss` that reports the mean of all logits, as Liger's does; ours is over the tokens that count."""

    class Loss(loss):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result, outputs = super().forward(*args, **kwargs)
            given = inspect.signature(super().forward).bind(*args, **kwargs).arguments
            logits = given["_input"].detach() @ given["lin_weight"].detach().t()
            logits = logits if given.get("bias") is None else logits + given["bias"].detach()
            if "preference_labels" in given:
                chosen = given["preference_labels"].bool()
                means = logits[chosen].float().sum(), logits[~chosen].float().sum()
            else:
                means = tuple(half.float().mean() for half in logits.chunk(2))
            return result, (*outputs[:2], *means, *outputs[4:])

    return Loss


_ADAPTED: dict[str, Any] = {
    **{name: _cast_to_input(getattr(nn, name)) for name in ("LigerCrossEntropyLoss", "LigerJSD")},
    **{
        f"LigerFusedLinear{name}Loss": _with_logits_of_all_tokens(getattr(losses, f"LigerFusedLinear{name}Loss"))
        for name in ("DPO", "ORPO", "CPO", "SimPO", "KTO")
    },
}


def _find(module: str, name: str) -> Any:
    for table in (_ADAPTED, _NAMES):
        if name in table:
            return table[name]
    if name in _ABSENT:
        return _Absent(name)
    return modules.find(module, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module of every `liger_kernel.*` whose names are looked up in the tables above."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        path_parts = fullname.split(".")
        deep = len(path_parts) > 3 and "experimental" not in path_parts
        if path_parts[0] != "liger_kernel" or deep or not path_parts[-1].islower():
            return None  # of a name that is not found in a module, Python asks whether it is one
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _find(module.__name__, name)

        module.__getattr__ = find  # type: ignore[method-assign]


sys.meta_path.insert(0, _Finder())
if _device() == "cpu":  # which Liger's tests ask for the size of its memory
    torch.cpu.get_device_properties = lambda index: types.SimpleNamespace(total_memory=0)  # type: ignore[attr-defined]


def _size(item: pytest.Item) -> int:
    """The product of a case's integer parameters, about how large its tensors are."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return math.prod(value for value in parameters if isinstance(value, int) and value > 1)


def pytest_configure() -> None:
    if _device() == "cpu":
        utils = importlib.import_module("test.utils")
        utils.supports_bfloat16 = lambda: True  # which asks for a GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, help="Run every N-th case of each test.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: collections.Counter[str] = collections.Counter()
    kept, left_out = [], []
    for item in items:
        if _device() == "cpu" and _size(item) > _LARGEST_ON_CPU:
            left_out.append(item)
            continue
        function = item.nodeid.split("[")[0]
        if function.split("::")[1] in TESTS_NOT_APPLICABLE:
            item.add_marker(pytest.mark.skip(reason=TESTS_NOT_APPLICABLE[function.split("::")[1]]))
        (left_out if seen[function] % config.getoption("--every") else kept).append(item)
        seen[function] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        for difference in DIFFERENCES:
            if difference.matches(item.nodeid, _device()):
                item.add_marker(pytest.mark.xfail(reason=difference.reason, strict=False))
