"""Loads a model whose quantised weights stay as they were published (`packed_base`).

transformers chooses the quantizer that loads a checkpoint by the `quant_method` of its configuration. While a model is
loaded here, that is our quantizer. It replaces linear layers and experts whose weights are packed in the files by
modules without data, lets transformers load and stack their tensors by its own rules, and turns these into packed
modules. Nothing is computed with the weights, so loading works on any device, a CPU too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS
from liger_trainer.compat.transformers import PACKED_CHECKPOINTS
from liger_trainer.kernels.lowbit.formats import BlockFp8Weight, Int4Weight, mxfp4_weight
from liger_trainer.packed.experts import PackedExperts, PackedStack, pack_experts, unpack_experts
from liger_trainer.packed.formats import METHODS, bytes_of_weights, fp8_block, packed_matrix
from liger_trainer.packed.modelopt import settings_of_file, settings_of_files
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.packed.published import (
    ENDING_OF_STACKS,
    DamagedError,
    Packed,
    Stack,
    Tensor,
    packed_in,
    read_headers,
)
from liger_trainer.packed.targets import settings_for

require(MODULE_CONTENTS)

_STACKING = {"MergeModulelist", "Concatenate"}  # what transformers may do with the matrices of experts
_ROWS_A_WORD = 8  # of zeros in INT4
_TRANSPOSED = "qweight"  # GPTQ and AWQ alone have it, and hold a weight's transpose
_loading = threading.RLock()


class PackedError(ValueError):
    """A weight of a checkpoint cannot stay packed."""


def quantization_of(config: Any) -> Any:
    """The quantisation settings of a model's configuration, or of its text configuration; None without any.

    They are a dictionary or an object of transformers. transformers itself looks in the same two places.
    """
    settings = getattr(config, "quantization_config", None)
    if settings or not hasattr(config, "get_text_config"):
        return settings or None
    return getattr(config.get_text_config(decoder=True), "quantization_config", None) or None


def method_of(config: Any) -> str | None:
    """The `quant_method` of a checkpoint's configuration if its weights may stay packed, else None."""
    name = getattr(config, "name_or_path", None)
    settings = quantization_of(config) or (settings_of_file(name) if name else None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    method = getattr(method, "value", method)
    return method if method in METHODS else None


@contextlib.contextmanager
def packed_loading(trained: Sequence[str] = ()) -> Iterator[None]:
    """Models that `from_pretrained` loads inside the context keep packed weights as they are.

    Others load as usual. One thread at a time may be inside.

    Args:
        trained: The modules that will be trained beside adapters (`modules_to_save`); loading a model that has packed
            weights in one is an error.
    """
    quantizers, configs = require(PACKED_CHECKPOINTS)[4:6]
    with _loading:
        before = dict(quantizers), dict(configs)
        quantizers.update(dict.fromkeys(METHODS, functools.partial(PackedQuantizer, trained=trained)))
        configs.update(dict.fromkeys(METHODS, PackedConfig))
        try:
            with settings_of_files():
                yield
        finally:
            for mapping, held in zip((quantizers, configs), before):
                mapping.clear()
                mapping.update(held)


def load_packed(name_or_path: str, model_class: Any = AutoModelForCausalLM, **from_pretrained: Any) -> Any:
    """A model whose quantised weights stay packed, to be trained with LoRA.

    Args:
        name_or_path: A folder or a name on the Hub, of a checkpoint in safetensors: FP8 (blocks of 128 x 128, a scale a
            row or a tensor, MXFP8), MXFP4 experts (gpt-oss), NVFP4, or INT4 (compressed-tensors, GPTQ, AWQ).
        model_class: The class whose `from_pretrained` loads it.
        **from_pretrained: Its keyword arguments, such as ``dtype``; no `quantization_config`.

    Returns:
        The model. Layers with a packed weight are `PackedLinear`, and stacked experts are decoded when they run. With
        ``output_loading_info=True``, the model and what `from_pretrained` says about its weights.

    Raises:
        ValueError: If the checkpoint is not quantised, is in another format, or holds a packed weight of a layer that
            is neither a linear layer nor stacked experts; if a file is cut short; and if scales are missing, have
            another shape, or are not finite.
    """
    if "quantization_config" in from_pretrained:
        raise ValueError("`quantization_config` is given, but packed weights are read as they are; leave it out.")
    with packed_loading():
        loaded = model_class.from_pretrained(name_or_path, **from_pretrained)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if not is_packed(model):
        method = method_of(model.config)
        why = f"names {method!r}, but its files hold every weight in 16 bits or more"
        if method is None:
            why = f"names none of {', '.join(METHODS)}"
        raise ValueError(
            f"{name_or_path!r} holds no packed weights: its configuration {why}. Load it with `from_pretrained`."
        )
    return loaded


def is_packed(model: nn.Module) -> bool:
    """Whether weights of `model` are packed."""
    return any(True for _ in packed_modules(model))


def packed_modules(model: nn.Module) -> Iterator[str]:
    """The names of the modules of `model` whose weights are packed."""
    return (path for path, module in model.named_modules() if isinstance(module, PackedLinear | PackedExperts))


def check_trained(names: Sequence[str], packed: Iterable[str]) -> None:
    """Checks that no module that PEFT copies and trains whole is packed or has a packed one inside.

    Args:
        names: The ends of their names (`modules_to_save`).
        packed: The names of packed modules.

    Raises:
        PackedError: If one is.
    """
    for path in packed:
        around = itertools.accumulate(path.split("."), "{}.{}".format)
        found = next((name for module in around for name in names if module.endswith(name)), None)
        if found is not None:
            raise PackedError(
                f"`modules_to_save` names {found!r}, but {path!r} stays packed, and codes cannot be trained. Name "
                "modules that the checkpoint has in 16 bits, such as 'lm_head'; or set `packed_base` to false."
            )


@torch.no_grad()
def dequantise(model: Any) -> Any:
    """Decodes the packed weights of `model`, in place, in its dtype, as if it had never been quantised.

    Nothing of the quantisation is left in its configuration, or would be saved with it.
    """
    for path, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(module.decoded(model.dtype), requires_grad=False)
            plain.register_parameter("bias", module.bias)
            model.set_submodule(path, plain.train(module.training))
        elif isinstance(module, PackedExperts):
            unpack_experts(module)
    model.hf_quantizer.remove_quantization_config(model)
    vars(model.config.get_text_config(decoder=True)).pop("quantization_config", None)
    model.__dict__.pop("_weight_conversions", None)  # else it would be saved as it was published, quantised
    model.decoded_here = True
    return model


def decoded_settings(model: Any, revision: str | None = None) -> dict[str, Any] | None:
    """The settings of the checkpoint that transformers decoded while it loaded `model`; None if it did not.

    Args:
        model: A model of transformers. Nothing in it says for certain that it was decoded, so its checkpoint is asked.
        revision: The revision of the checkpoint on the Hub.
    """
    name = getattr(model.config, "name_or_path", None)
    if not name or is_packed(model) or hasattr(model, "hf_quantizer") or getattr(model, "decoded_here", False):
        return None
    try:
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision, local_files_only=True)
    except OSError:  # it has been deleted
        return None
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    return settings if settings.get("quant_method") in METHODS else None


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a model with packed weights: what the checkpoint has, unchanged."""

    def __init__(self, **settings: Any) -> None:
        self.quant_method, self.settings = settings["quant_method"], settings

    def to_dict(self) -> dict[str, Any]:
        """What the checkpoint's configuration has."""
        return dict(self.settings)


class _Skeleton(nn.Module):
    """Stands for a layer while its tensors are loaded: has parameters without data, by their published names."""

    def __init__(self, layer: nn.Linear, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = [layer]  # in a list, so that it is no child
        for name, tensor in tensors.items():
            self.register_parameter(name, _without_data(tensor.dtype, tensor.shape))
        self.register_parameter("bias", layer.bias)
        self._is_hf_initialized = True


class PackedQuantizer(HfQuantizer):
    """Our quantizer, which replaces those of transformers while a model is loaded."""

    requires_calibration = False
    quantization_config: PackedConfig

    def __init__(self, *args: Any, trained: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained = trained
        self.checkpoint_files: list[str] = []

    @property
    def is_trainable(self) -> bool:
        """Adapters on packed weights train."""
        return True

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype in which a tensor is loaded: 8-bit floats keep theirs, even if a class keeps the layer in fp32."""
        own = str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype)
        return None if own.startswith(("F8", "torch.float8")) else super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """The rules of transformers, and a copy of those that stack experts for each tensor beside their `weight`.

        transformers' own copies (`serialized_names`) are for one format. The tensors of GPTQ and AWQ have a weight's
        rows as their last dimension, so gate and up of an expert are put side by side.
        """
        _, _, converter, *_, concatenate = require(PACKED_CHECKPOINTS)
        parameters, added = "\n".join(name for name, _ in model.named_parameters()), []
        for rule in (each for each in weight_conversions if isinstance(each, converter)):
            sources, targets = rule._original_source_patterns, rule._original_target_patterns
            if not all(each.endswith(".weight") for each in sources):
                continue
            for name, transposed in self._beside_weights.items():
                ending = _ending_of(name, transposed)
                if not re.search(f"{targets[0]}{ending}$", parameters, re.MULTILINE):
                    continue
                steps = [
                    concatenate(dim=-1) if transposed and isinstance(each, concatenate) else each
                    for each in rule.operations
                ]
                named = [each.removesuffix("weight") + name for each in sources]
                added.append(rule.copy(named, [f"{each}{ending}" for each in targets], operations=steps))
        return super().update_weight_conversions(weight_conversions, model) + added

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` writes the checkpoint: not where experts were stacked."""
        return not self._experts

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What `save_pretrained` writes: every tensor by its name, in its dtype and shape, as it was published."""
        state = model.state_dict()
        for path, module in model.named_modules():
            if isinstance(module, PackedLinear):
                prefix = path + "." * bool(path)
                tensors = {f"{prefix}{name}": (f"{prefix}{own}", tensor) for own, name, tensor in module.published()}
                for own, _ in tensors.values():
                    del state[own]
                state |= {name: tensor for name, (_, tensor) in tensors.items()}
        return state | {self._beside.get(name, name): each for name, each in self.read_left_out().items()}, {}

    def read_left_out(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint that others read and the model does not, by their names there."""
        from safetensors import safe_open

        found: dict[str, torch.Tensor] = {}
        for file in self.checkpoint_files if self.left_out else ():
            with safe_open(file, "pt") as tensors:
                found |= {name: tensors.get_tensor(name).clone() for name in {*self.left_out} & {*tensors.keys()}}
        return found

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("`packed_base` reads files of a checkpoint, but a state dict is given. Give their folder.")
        if isinstance(device_map, dict) and len(set(device_map.values())) > 1:
            devices = ", ".join(map(str, dict.fromkeys(device_map.values())))
            raise ValueError(f"`device_map` spreads the model over {devices}; with packed weights, give one device.")
        self.checkpoint_files = checkpoint_files
        if any((self._settings.get("transform_config") or {}).values()):
            raise PackedError(
                "`packed_base`: the checkpoint's `quantization_config` has a `transform_config`, and inputs of packed "
                "layers are not transformed. Set `packed_base` to false."
            )
        self._replace_weights(model, packed_in(model, read_headers(checkpoint_files)))

    def _replace_weights(self, model: Any, found: Packed) -> None:
        """Replaces weights that a checkpoint holds packed by parameters without data, one for each of its tensors."""
        self._experts: dict[str, dict[str, bool]] = {}  # by module: its packed weights, and whether they are transposed
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the weights that transformers stacks
        self._endings: dict[str, dict[str, str]] = {}  # by such a weight: its tensors' endings here, and names there
        self._beside_weights: dict[str, bool] = {}  # names there of tensors of stacks, and whether of transposes
        self._order: dict[str, tuple[str, ...]] = {}  # by module of experts: the names of all its parameters
        self._beside = found.beside
        self.left_out = [*found.beside]  # and tensors of stacked weights that are not loaded, such as `input_scale`
        check_trained(
            self.trained, [*found.linears, *(name.rpartition(".")[0] for name in found.stacks), *found.experts]
        )
        width = bytes_of_weights(self._settings)
        for name, has in found.missing.items():
            module = name.removesuffix(".weight")
            if width(module, module == name) is None:
                continue
            if has:
                raise _cannot(module, f"the checkpoint has {', '.join(map(repr, has))} in place of its weight")
            raise DamagedError(f"it has no weight of {module!r}, which its configuration does not leave in 16 bits")
        for path, tensors in found.linears.items():
            layer = model.get_submodule(path)
            if type(layer) is not nn.Linear or layer is model.get_output_embeddings():
                kind = "the head" if type(layer) is nn.Linear else f"a {type(layer).__name__}"
                raise _cannot(path, f"it is {kind}, whose weight does not stay packed")
            model.set_submodule(
                path, _Skeleton(layer, {name: each for name, each in tensors.items() if name != "bias"})
            )
        for name, stack in found.stacks.items():
            self._prepare_stack(model, name, stack)
        for path, tensors in found.experts.items():
            self._prepare_stacked(model, path, tensors)

    def _prepare_stack(self, model: Any, name: str, stack: Stack) -> None:
        """Replaces a parameter of experts, which transformers stacks, by one for each of its packed tensors."""
        path, _, leaf = name.rpartition(".")
        experts, (count, *declared) = self._experts_at(model, path), model.get_parameter(name).shape
        if not {*stack.operations} <= _STACKING or len(declared) != 2 or declared[0] % stack.parts:
            raise _cannot(name, f"its experts, {(count, *declared)}, are stacked in a way that is not known")
        if stack.owners and len(stack.owners) != count * stack.parts:
            has = f"{len(stack.owners)} of its {count * stack.parts} matrices in few bits"
            raise _cannot(name, f"the checkpoint has {has}; the others are missing or in 16 bits")
        try:
            names = stackable(stack, (declared[0] // stack.parts, declared[1]), self._settings_for(name, True))
        except (ValueError, KeyError) as error:
            raise _cannot(name, str(error)) from error
        self.left_out += [f"{owner}.{each}" for owner in stack.owners for each in stack.matrix if each not in names]
        transposed = _TRANSPOSED in names
        experts._parameters.pop(leaf)
        for each in names:
            dtype, sizes = stack.matrix[each].dtype, [*stack.matrix[each].shape]
            sizes[-1 if transposed else 0] *= stack.parts
            ending = _ending_of(each, transposed)
            self._register_empty(experts, f"{leaf}{ending}", Tensor(dtype, (count, *sizes)))
            self._endings.setdefault(name, {})[ending] = each
        self._beside_weights |= {each: transposed for each in names if each != "weight"}
        self._experts.setdefault(path, {})[leaf] = False
        self._shapes[name] = (count, *declared)

    def _prepare_stacked(self, model: Any, path: str, tensors: dict[str, Tensor]) -> None:
        """The same for experts that are stacked in the checkpoint: blocks and scales of MXFP4, outputs first."""
        experts = self._experts_at(model, path)
        for leaf in dict.fromkeys(re.sub(ENDING_OF_STACKS, "", name) for name in tensors):
            scales = f"{leaf}_scales"
            has = [name for name in (f"{leaf}_blocks", scales) if name in tensors]
            if f"{leaf}_scale_inv" in tensors:
                raise _cannot(f"{path}.{leaf}", "its experts are stacked in the checkpoint, but not in MXFP4")
            if not has:  # not in few bits, such as a bias
                continue
            if len(has) == 1:
                raise DamagedError(f"{path!r} has {has[0]!r}, of which blocks or scales are missing")
            matrix = (tensors[scales].shape[1], 32 * tensors[scales].shape[2])
            declared = tuple(experts.get_parameter(leaf).shape[1:])
            if declared not in (matrix, matrix[::-1]):
                raise _cannot(f"{path}.{leaf}", f"its blocks are of matrices of {matrix}, the model's are {declared}")
            transposed = declared != matrix or bool(getattr(experts, "is_transposed", False))
            experts._parameters.pop(leaf)
            for name in (f"{leaf}_blocks", scales):
                self._register_empty(experts, name, tensors[name])
            self._experts.setdefault(path, {})[leaf] = transposed

    def _experts_at(self, model: Any, path: str) -> nn.Module:
        experts = model.get_submodule(path)
        self._order.setdefault(path, tuple(experts._parameters))
        return experts

    def _register_empty(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        module._parameters.pop(name, None)
        module.register_parameter(name, _without_data(tensor.dtype, tensor.shape))
        module._is_hf_initialized = True  # type: ignore[assignment]  # else the class would initialise what it lacks

    @property
    def _settings(self) -> dict[str, Any]:
        return self.quantization_config.settings

    def _settings_for(self, name: str, stacked: bool = False) -> Mapping[str, Any]:
        return settings_for(self._settings, name, stacked) or self._settings  # the headers say what is quantised

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for path, module in list(model.named_modules()):
            if isinstance(module, _Skeleton):
                model.set_submodule(path, self._linear(path, module))
        for path, names in self._experts.items():
            self._pack(path, model.get_submodule(path), names, model.dtype)
        return model

    def _linear(self, path: str, skeleton: _Skeleton) -> PackedLinear:
        (layer,) = skeleton.layer
        parameters = dict(skeleton.named_parameters())
        layer.register_parameter("bias", parameters.pop("bias", None))
        tensors = {name: _loaded(path, name, each) for name, each in parameters.items()}
        try:
            shape = (layer.out_features, layer.in_features)
            weight, names = packed_matrix(tensors, shape, self._settings_for(path))
        except (ValueError, KeyError) as error:
            raise _cannot(path, str(error)) from error
        _check_numbers(path, tensors, names)
        published = {part: (name, tensors[name].dtype, tuple(tensors[name].shape)) for part, name in names.items()}
        others = {name: tensor for name, tensor in tensors.items() if name not in names.values()}
        return _filled(PackedLinear(layer, weight, published, others))

    def _pack(self, path: str, experts: nn.Module, names: dict[str, bool], dtype: torch.dtype) -> None:
        stacks = {}
        for leaf, transposed in names.items():
            loaded = {}
            for name, parameter in list(experts.named_parameters(recurse=False)):
                if (name == leaf or name.startswith(f"{leaf}_")) and not name.endswith("_bias"):
                    loaded[name.removeprefix(leaf)] = _loaded(f"{path}.{leaf}", name, parameter)
                    del experts._parameters[name]
            published = self._endings.get(f"{path}.{leaf}", {})
            tensors = {published.get(ending, f"weight{ending}"): tensor for ending, tensor in loaded.items()}
            try:
                if "_blocks" in loaded:
                    weight: Any = mxfp4_weight(loaded["_blocks"], loaded["_scales"])
                    of_weight = {"codes": "weight_blocks", "scales": "weight_scales"}
                else:
                    settings = self._settings_for(f"{path}.{leaf}", True)
                    weight, of_weight = packed_matrix(tensors, self._shapes[f"{path}.{leaf}"], settings)
            except (ValueError, KeyError) as error:
                raise _cannot(f"{path}.{leaf}", str(error)) from error
            _check_numbers(f"{path}.{leaf}", tensors, of_weight)
            stacks[leaf] = PackedStack(weight, transposed, dtype)
        pack_experts(experts, stacks, self._order[path])
        _filled(experts)


def stackable(stack: Stack, shape: tuple[int, int], settings: Mapping[str, Any]) -> list[str]:
    """The names of the tensors from which packed experts are decoded, if they can be stacked.

    Gate and up are the rows of one weight, one below the other.

    Args:
        stack: The matrices.
        shape: (outputs, inputs) of one matrix.
        settings: The checkpoint's `quantization_config`, as `packed_matrix` takes it.

    Raises:
        ValueError: If the format is not known, or has tensors that cannot be stacked row by row.
    """
    order = {"g_idx", "weight_g_idx"} & stack.matrix.keys()  # checked when their values are loaded
    headers = {name: each for name, each in stack.matrix.items() if name not in order}
    tensors = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in headers.items()}
    weight, names = packed_matrix(tensors, shape, settings)
    rows = shape[0]
    if isinstance(weight, BlockFp8Weight):
        height, grid = weight.block[0], tensors[names["scales"]].shape
        if fp8_block(tensors[names["scales"]], shape, settings) is None and grid != (rows, 1):
            raise ValueError("its experts have one scale each; stacked experts need one for each block or row")
        if stack.parts > 1 and rows % height:
            raise ValueError(
                f"gate and up of an expert have {rows} rows each, which blocks of {height} do not divide: the scales "
                "of both, one below the other, are not those of blocks"
            )
    if isinstance(weight, Int4Weight) and weight.zeros is not None and stack.parts > 1 and rows % _ROWS_A_WORD:
        raise ValueError(f"gate and up of an expert have {rows} rows each, whose zeros do not fill words of 8")
    for name in names.values():
        if not tensors[name].dim():
            raise ValueError(f"its experts have one {name!r} each, a scalar, which is not stacked")
    return [*names.values(), *order]


def _ending_of(name: str, transposed: bool) -> str:
    """What the name of a stack's parameter has after that of the weight, for the tensor `name` of its matrices."""
    return f"_{name}" if transposed else name.removeprefix("weight")


def _without_data(dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _filled(module: nn.Module) -> Any:
    """`module`, whose parameters a checkpoint has filled, with transformers' mark of that."""
    for parameter in module.parameters(recurse=False):
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return module


def _loaded(owner: str, name: str, parameter: nn.Parameter) -> torch.Tensor:
    """The data of the parameter `name` of `owner`, which the checkpoint has filled."""
    if not getattr(parameter, "_is_hf_initialized", False):
        raise _cannot(owner, f"transformers has found no {name!r}, or not all parts of it, in the checkpoint")
    return parameter.detach()


def _check_numbers(owner: str, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
    """Checks that the scales of a packed weight are finite, and that its groups of columns exist.

    A scale that is not finite spoils a whole group of weights.

    Args:
        owner: The layer or the stack.
        tensors: Its tensors in the checkpoint, by the last parts of their names.
        names: The names in `tensors`, by those of the packed weight's fields.

    Raises:
        DamagedError: For a scale that is NaN or infinite, a global scale of 0, and a group that does not exist.
    """
    if "group_of" in names and not tensors[names["group_of"]].is_meta:
        name, of_groups = names["group_of"], names["scales"]
        groups = tensors[of_groups].shape[0 if of_groups == "scales" else -1]  # GPTQ's scales are transposed
        low, high = (int(each) for each in tensors[name].aminmax())
        if low < 0 or high >= groups:
            raise DamagedError(
                f"{name!r} of {owner!r} has groups from {low} to {high}, and its {groups} groups are 0 to {groups - 1}"
            )
    for name in (name for part, name in names.items() if part in ("scales", "global_scale")):
        scales = tensors[name]
        wrong = scales == 255 if scales.dtype == torch.uint8 else ~scales.float().isfinite()  # e8m0's NaN
        kinds, expected = "NaN or infinite", "finite"
        if name == names.get("global_scale"):
            wrong, kinds, expected = wrong | (scales == 0), "NaN, infinite or 0", "finite and not 0"
        count = 0 if scales.is_meta else int(wrong.sum())
        if count:
            first = tuple(wrong.nonzero()[0].tolist())
            raise DamagedError(
                f"{count} of the {wrong.numel()} scales of {owner!r} ({name!r}) are {kinds}, the first at "
                f"{first}, and must be {expected}"
            )


def _cannot(name: str, reason: str) -> PackedError:
    return PackedError(f"`packed_base`: {name!r} cannot stay packed: {reason.rstrip('.')}. Set `packed_base` to false.")
