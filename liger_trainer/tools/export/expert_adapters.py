"""Takes adapters on stacked experts apart: an adapter on each linear layer of each expert, as servers read them.

PEFT keeps the adapter on a stack (`target_parameters`) of E experts, at rank r, as one A, (E * r, in), the experts one
below the other, and one B, (out, r * E), in which the experts of a rank are neighbours. An expert's own are A's rows
``e * r : (e + 1) * r`` and B's columns ``e :: E``. A stack of gate and up has their rows in B one below the other, and
both have the same A. Nothing is computed: the numbers are those of the run.

Which rows of a stack are which layer, and what that layer is called, are transformers' own rules, by which it writes a
model's checkpoint: they are given the numbers of the rows in place of weights.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from liger_trainer.compat.peft import STACKED_ADAPTERS
from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import PUBLISHED_NAMES
from liger_trainer.errors import UserError
from liger_trainer.patching.moe.lora_experts import is_param_wrapper
from liger_trainer.recipe.file import first_line
from liger_trainer.tools.export.folders import new_folder
from liger_trainer.tools.export.saved_run import (
    SavedRun,
    add_adapter,
    class_of_model,
    copy_quantization,
    read_base_config,
)

if TYPE_CHECKING:
    from peft import LoraConfig

require(STACKED_ADAPTERS)

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_RANK_FIRST = ("lora_A.weight", "lora_embedding_A")
_RANK_LAST = ("lora_B.weight", "lora_embedding_B")


class Exported(NamedTuple):
    """What was written."""

    layers: int  # linear layers of experts that have an adapter of their own now
    rank: int  # of every adapter in the file
    lacking: tuple[str, ...]  # parameters of adapted experts without adapters
    by_peft: bool  # whether PEFT reads them back as they are
    stacked: bool  # whether PEFT stacks adapters of single experts of this type of model


class _Piece(NamedTuple):
    """A linear layer of an expert."""

    name: str  # of the layer, in the published checkpoint
    expert: int
    rows: torch.Tensor  # of the stack's output features


def export_per_expert(run: SavedRun, folder: Path, say: Callable[[str], Any] = print) -> Exported:
    """Writes the adapters of `run` into `folder`, those on stacked experts taken apart.

    Args:
        run: A run with LoRA adapters on stacked experts.
        folder: An empty folder, or one that does not exist.
        say: Gets a line for each step.

    Raises:
        UserError: If there are no adapters on stacked experts, transformers has no names for single ones, ranks or
            scales cannot be those of one rank, or `folder` is not empty or cannot be written.
    """
    file, adapter = run.folder / FILE, cast(Any, run.adapter)
    kind = str(getattr(getattr(adapter, "peft_type", None), "value", None))
    if kind != "LORA":
        what = "a whole model" if adapter is None else f"adapters of the kind {kind}"
        raise UserError(f"{str(run.folder)!r} holds {what}; `export-adapter` takes LoRA adapters apart.")
    if not file.is_file():
        raise UserError(f"{str(run.folder)!r} holds no {FILE}; save the adapters again with `safe_serialization`.")
    if not adapter.target_parameters:
        raise UserError(
            f"The adapters in {str(run.folder)!r} are on no stacked experts (`target_parameters`); serve them as they "
            "are."
        )
    with new_folder(folder) as unfinished:
        say(f"Taking apart the adapters on stacked experts in {run.folder}, whose base model is {run.base}.")
        adapted = _adapted(run)
        tensors = load_file(file)
        layers, lacking = _take_apart(run, adapted, tensors)
        config = _config(adapter, adapted, tensors, layers)
        rank = _to_one_rank(config, adapted, tensors)
        config.save_pretrained(str(unfinished))
        save_file({name: each.contiguous() for name, each in tensors.items()}, unfinished / FILE, {"format": "pt"})
        copy_quantization(run, unfinished)
        by_peft, stacked = _reads(run, unfinished, _scales(adapted))
    return Exported(len(layers), rank, lacking, by_peft, stacked)


def _base(run: SavedRun) -> Any:
    """The base model of `run`, without data."""
    config = read_base_config(run)
    cls, options = class_of_model(run, config)
    config.update(options)
    with torch.device("meta"):
        return getattr(cls, "from_config", cls)(config)


def _adapted(run: SavedRun) -> Any:
    """The model of `run` with its adapters, all without data."""
    from peft import get_peft_model

    adapter: Any = copy.deepcopy(run.adapter)
    adapter.init_lora_weights = True  # no other way works without data
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(_base(run), adapter)
    except Exception as error:  # each architecture and each kind of adapter has its own errors
        raise UserError(
            f"The adapters in {str(run.folder)!r} do not fit their base model {run.base!r}: {first_line(error)} Give "
            "the model that they were trained on with `--base_model`."
        ) from error


def _reads(run: SavedRun, folder: Path, scales: set[float]) -> tuple[bool, bool]:
    """Whether PEFT finds a place for each tensor in `folder`, with the same scales; and whether it stacks experts'.

    It stacks adapters of single experts for some types of models, and otherwise looks for linear layers.
    """
    base = _base(run)
    try:
        model = add_adapter(dataclasses.replace(run, folder=folder), base)
        found = all(math.isclose(one, other) for one in _scales(model) for other in scales)
    except UserError:
        found = False
    return found, any(is_param_wrapper(each) and each.num_experts > 1 for each in base.modules())  # PEFT's, in place


def _scales(model: Any) -> set[float]:
    """The factors of the adapters."""
    scalings = [each.scaling for each in model.modules() if isinstance(getattr(each, "scaling", None), dict)]
    return {scale for scaling in scalings for scale in scaling.values()}


def _take_apart(run: SavedRun, adapted: Any, tensors: dict[str, torch.Tensor]) -> tuple[list[str], tuple[str, ...]]:
    """Replaces the adapters on stacks in `tensors`; the names of the layers that get one, and what has none."""
    base = adapted.get_base_model()
    stacks = {
        path: module for path, module in base.named_modules() if is_param_wrapper(module) and module.num_experts > 1
    }
    if not stacks:
        raise UserError(
            f"{run.base!r} has no stacked experts by the names of `target_parameters` in {str(run.folder)!r}; give the "
            "model that they were trained on with `--base_model`."
        )
    layers, lacking = [], set()
    for path, wrapper in stacks.items():
        experts = wrapper.get_base_layer()
        a, b = (
            _taken(run, tensors, f"{_PREFIX}{path}.{leaf}", getattr(wrapper, leaf)) for leaf in ("lora_A", "lora_B")
        )
        a = a.reshape(wrapper.num_experts, -1, a.shape[1])
        b = b.reshape(b.shape[0], -1, wrapper.num_experts)
        inside = path.removesuffix(".base_layer")
        while inside.endswith(".base_layer"):
            inside = inside.removesuffix(".base_layer")
        swapped = wrapper._did_swap_in_out_features
        for piece in _pieces(run, base, f"{inside}.{wrapper.parameter_name}", wrapper.num_experts, len(b), swapped):
            tensors[f"{_PREFIX}{piece.name}.lora_A.weight"] = a[piece.expert].clone()  # files take no shared memory
            tensors[f"{_PREFIX}{piece.name}.lora_B.weight"] = b[piece.rows, :, piece.expert]
            layers.append(piece.name)
        own = {name for name, each in experts.named_parameters(recurse=False) if each.dim() == 3}
        adapted_ones = {each.parameter_name for each in stacks.values() if each.get_base_layer() is experts}
        lacking |= own - adapted_ones
    return layers, tuple(sorted(lacking))


def _taken(run: SavedRun, tensors: dict[str, torch.Tensor], name: str, places: Any) -> torch.Tensor:
    """The tensor of a stack's adapter, which is no longer in `tensors`."""
    found, wanted = tensors.pop(f"{name}.weight", None), tuple(places["default"].weight.shape)
    if found is None or found.shape != wanted:
        what = "is missing" if found is None else f"is {tuple(found.shape)}"
        raise UserError(
            f"The adapters in {str(run.folder)!r} do not fit their base model {run.base!r}: {name!r} {what}, and the "
            f"model has a place for {wanted}. Give the model that they were trained on with `--base_model`."
        )
    return found


def _pieces(run: SavedRun, model: Any, name: str, experts: int, features: int, outputs_first: bool) -> Iterator[_Piece]:
    """The linear layers that the stack `name` is made of, by the rules by which transformers writes a checkpoint."""
    revert_weight_conversion = require(PUBLISHED_NAMES)[0]
    numbers = torch.arange(experts * features).view(experts, features, 1)
    published = revert_weight_conversion(model, {name: numbers if outputs_first else numbers.mT})
    parts = {key: part.flatten() for key, part in published.items()}
    whole = torch.equal(torch.cat([*parts.values()]).sort().values, numbers.flatten())
    if not whole or any(part.min() // features != part.max() // features for part in parts.values()):
        raise UserError(
            f"{run.base!r} is a {model.config.model_type}, for which transformers knows no names of single experts: "
            f"its checkpoint has {name.rpartition('.')[2]} of a layer in one tensor. Serve the adapters as they are, "
            "or merge them (`liger-trainer merge`)."
        )
    for key, part in parts.items():
        yield _Piece(key.removesuffix(".weight"), int(part[0]) // features, part % features)


def _config(adapter: Any, adapted: Any, tensors: Mapping[str, torch.Tensor], layers: list[str]) -> LoraConfig:
    """The configuration of `adapter` with the layers of experts as targets, in place of the stacks."""
    config = copy.deepcopy(adapter)
    stacks = [each for each in adapted.get_base_model().modules() if is_param_wrapper(each)]
    others = {each for each in config.target_parameters if not _names_a_stack(each, stacks)}
    more = {name.rpartition(".")[2] for name in layers}
    more |= {name.removesuffix(".weight").rpartition(".")[2] for name in others}  # of matrices, such as a router's
    if isinstance(config.target_modules, str):
        config.target_modules = rf"({config.target_modules})|(.*\.({'|'.join(map(re.escape, sorted(more)))}))"
    else:
        config.target_modules = {*(config.target_modules or ()), *more}
    config.target_parameters = None
    config.inference_mode = True
    return config


def _names_a_stack(target: str, wrappers: list[Any]) -> bool:
    return any(each.num_experts > 1 and target.endswith(each.parameter_name) for each in wrappers)


def _to_one_rank(config: Any, adapted: Any, tensors: dict[str, torch.Tensor]) -> int:
    """Fills the adapters in `tensors` up with zeros to the largest rank, which servers take all of them to have."""
    ranks = {key: each.shape[0] for key, each in tensors.items() if key.endswith(_RANK_FIRST)}
    largest = max(ranks.values())
    config.rank_pattern, config.alpha_pattern = {}, {}
    scales = _scales(adapted)
    if len(scales) > 1:
        raise UserError(
            f"The adapters have scales of {min(scales):g} to {max(scales):g} (`alpha_pattern`, or `use_rslora` at "
            "several ranks), and servers take one; merge them (`liger-trainer merge`)."
        )
    if {*ranks.values()} == {config.r} and not config.use_rslora:
        return largest
    alpha = scales.pop() * largest
    config.r, config.lora_alpha = largest, int(alpha) if alpha == int(alpha) else alpha
    config.use_rslora = False  # PEFT doubles rank and alpha of gate and up together, with which a root is another scale
    for key, each in tensors.items():
        if key.endswith(_RANK_FIRST):
            tensors[key] = F.pad(each, (0, 0, 0, largest - each.shape[0]))
        elif key.endswith(_RANK_LAST):
            tensors[key] = F.pad(each, (0, largest - each.shape[1]))
    return largest
