"""Bases in few bits for `bench training`: random codes and scales in published formats, which stay packed.

The model is built as `load_packed` builds it, but for the files: it has no data, its layers and experts wait for the
tensors of a checkpoint, these are drawn on the device in the checkpoint's dtypes, and packed modules are made of them.
So neither the model in 16 bits nor a file is ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.kernels.runtime import cdiv
from liger_trainer.packed.loading import PackedConfig, PackedQuantizer, stackable
from liger_trainer.packed.published import Packed, Stack, Tensor

_E4M3 = torch.float8_e4m3fn
_DEVIATION = 0.02  # of the weights, about that of random ones
_E4M3_CODES, _INT4_CODES = 100.0, 4.6  # standard deviations of what is drawn, without its scale
_E8M0_SCALES = 119, 121  # 2^-8 or 2^-7: e2m1 drawn evenly has a standard deviation of 2.9
_OTHERS = "fp8_blocks, fp8_rows or int4"
_GROUP = 128  # columns that share a scale in INT4
_STACKED = ("MergeModulelist", "Concatenate")
_IN_16_BITS = {"gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b"}
"""Modules that are published in 16 bits, beside the head: routers, and the smallest layers of gated delta nets."""


class _Form(NamedTuple):
    """A format: what a checkpoint has of a matrix, (rows, columns), and the settings in its configuration."""

    matrix: Callable[[int, int], dict[str, Tensor]]
    settings: dict[str, Any]


def _fp8_blocks(rows: int, columns: int) -> dict[str, Tensor]:
    scales = Tensor(torch.bfloat16, (cdiv(rows, 128), cdiv(columns, 128)))
    return {"weight": Tensor(_E4M3, (rows, columns)), "weight_scale_inv": scales}


def _fp8_rows(rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight": Tensor(_E4M3, (rows, columns)), "weight_scale": Tensor(torch.bfloat16, (rows, 1))}


def _int4(rows: int, columns: int) -> dict[str, Tensor]:
    scales = Tensor(torch.bfloat16, (rows, cdiv(columns, _GROUP)))
    return {"weight_packed": Tensor(torch.int32, (rows, cdiv(columns, 8))), "weight_scale": scales}


def _mxfp4(rows: int, columns: int) -> dict[str, Tensor]:
    groups = columns // 32
    return {"_blocks": Tensor(torch.uint8, (rows, groups, 16)), "_scales": Tensor(torch.uint8, (rows, groups))}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_FORMS = {
    "fp8_blocks": _Form(_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8_rows": _Form(_fp8_rows, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "int4": _Form(_int4, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=_GROUP)),
    "mxfp4": _Form(_mxfp4, {"quant_method": "mxfp4"}),
}


def published(name: str, model: Any, kind: str) -> Packed:
    """What a checkpoint of `model` in the format `kind` would hold packed.

    Args:
        name: The model's, in `MODELS`.
        model: Without data.
        kind: A format.

    Raises:
        BenchmarkError: If the format does not fit the model.
    """
    form, found = _FORMS[kind], Packed({}, {}, {}, {}, {})
    for path, module in model.named_modules():
        in_layers = ".layers." in path and not _IN_16_BITS & {*path.split(".")}  # the head is outside of them
        if path.endswith(".experts"):
            _add_experts(found, name, path, module, kind)
        elif type(module) is nn.Linear and in_layers and kind != "mxfp4":  # in which experts alone are published
            found.linears[path] = form.matrix(module.out_features, module.in_features)
    if kind == "mxfp4" and not found.experts:
        raise _unfit(name, kind, f"it is the format of gpt-oss's experts; give {_OTHERS}")
    layers = model.config.num_hidden_layers
    if MODELS[name].experts and layers > MODELS[name].first_with_experts and not (found.stacks or found.experts):
        raise _unfit(name, kind, "its experts do not stay packed; leave `--quantize` out")
    return found


def _add_experts(found: Packed, name: str, path: str, experts: nn.Module, kind: str) -> None:
    form = _FORMS[kind]
    stacked = {leaf: each for leaf, each in experts.named_parameters(recurse=False) if each.dim() == 3}
    if getattr(experts, "is_transposed", False):  # gpt-oss
        if kind != "mxfp4":
            raise _unfit(name, kind, "its experts are published in MXFP4; give mxfp4")
        found.experts[path] = {
            f"{leaf}{ending}": Tensor(each.dtype, (len(weight), *each.shape))
            for leaf, weight in stacked.items()
            for ending, each in form.matrix(weight.shape[2], weight.shape[1]).items()
        }
    elif kind != "mxfp4" and type(experts) is not Llama4TextExperts:  # whose stacks are transposed too
        for leaf, weight in stacked.items():
            parts = 2 if leaf.startswith("gate_up") else 1
            shape = weight.shape[1] // parts, weight.shape[2]
            stack = found.stacks[f"{path}.{leaf}"] = Stack(form.matrix(*shape), parts, _STACKED)
            try:
                stackable(stack, shape, form.settings)
            except ValueError as error:
                raise _unfit(name, kind, str(error)) from error


def _unfit(name: str, kind: str, reason: str) -> BenchmarkError:
    return BenchmarkError(f"`--quantize` is {kind!r}, which does not fit {name}: {reason}.")


def check_packed_base(name: str, kind: str, layers: int = 0) -> None:
    """Checks that the format fits the model, before anything is measured.

    Raises:
        BenchmarkError: If it does not.
    """
    from transformers import AutoModelForCausalLM

    least = MODELS[name].first_with_experts + 1  # a layer with experts
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(MODELS[name], min(layers or least, least)))
    published(name, model, kind)


class _Drawn(PackedQuantizer):
    """The quantizer of packed checkpoints, which waits for the tensors `found` and reads no files."""

    def __init__(self, found: Packed, settings: dict[str, Any]) -> None:
        super().__init__(PackedConfig(**settings), pre_quantized=True)
        self.found = found

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._replace_weights(model, self.found)


def pack_randomly(name: str, kind: str, model: Any, device: torch.device) -> Any:
    """Gives a model without data random weights on `device`, packed in the format `kind`, and freezes it.

    Args:
        name: The model's, in `MODELS`.
        kind: A format.
        model: On the meta device, in the dtype of what is not packed.
        device: Where its weights are drawn.

    Returns:
        The model.
    """
    found = published(name, model, kind)
    quantizer = model.hf_quantizer = _Drawn(found, dict(_FORMS[kind].settings))
    quantizer.preprocess_model(model)
    model.to_empty(device=device)
    stacks = (name.rpartition(".")[0] for name in found.stacks)
    for path in dict.fromkeys((*found.linears, *found.experts, *stacks)):  # in this order in every process
        for leaf, parameter in model.get_submodule(path).named_parameters(recurse=False):
            _draw(leaf, parameter.data, kind)
            parameter._is_hf_initialized = True
    model.initialize_weights()  # all others
    model.tie_weights()
    for parameter in model.parameters():  # as transformers marks what it has loaded, which ours looks for
        parameter._is_hf_initialized = True
    quantizer.postprocess_model(model)
    return model.requires_grad_(False)


def _draw(name: str, tensor: torch.Tensor, kind: str) -> None:
    """Fills a tensor of a checkpoint with values whose weights have about the deviation of a random model's."""
    if name.endswith("bias"):
        tensor.zero_()
    elif tensor.dtype == _E4M3:  # by parts, so that nothing as large is held in 32 bits
        for part in tensor.split(cdiv(len(tensor), 64)):
            part.copy_(torch.randn(part.shape, device=tensor.device).mul_(_E4M3_CODES).clamp_(-448, 448))
    elif tensor.dtype == torch.int32:
        tensor.random_(-(2**31), 2**31)
    elif name.endswith("_blocks"):
        tensor.random_(0, 256)
    elif name.endswith("_scales"):
        tensor.random_(*_E8M0_SCALES)
    else:
        tensor.uniform_(0.8, 1.2).mul_(_DEVIATION / (_INT4_CODES if kind == "int4" else _E4M3_CODES))
