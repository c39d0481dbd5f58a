"""Checks of models whose layers have a state, and of how much of any model adapters reach.

The checks are of packed documents that see each other, adapters that leave out most of the linear layers or all of one
kind of mixer, and flash-linear-attention where it computes wrong gradients.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer.packing.proof import small_config
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.recurrent.find import is_mixer
from liger_trainer.plan.parameters import decoder_layers
from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.model import model_class
from liger_trainer.tools.diagnosis.sample import CannotCheckError, Case, Trap
from liger_trainer.tools.planning.inputs import kernels_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from liger_trainer.patching.report import KernelReport

LEAST_CHANGE = 1e-5
"""Relative change of float32 logits from which a document is taken to depend on the one before it."""

_LENGTH = 7  # of each document; longer than the window of the small copy


def leaks(case: Case) -> list[Trap]:
    """Rows that SFT packs without a boundary that every layer respects."""
    values = case.values
    if values["trainer"] != "sft" or not (values["packing"] or values["padding_free"]):
        return []
    if values["packing"] and values["packing_strategy"] == "wrapped":
        return [
            Trap(
                '`packing_strategy: "wrapped"` has no boundaries: every document sees those before it in its row, '
                "while the loss looks healthy",
                '`packing_strategy: "bfd"`, or "bfd_split"',
            )
        ]
    key = "packing" if values["packing"] else "padding_free"
    stateful, flash = _stateful(case.config), str(values["attn_implementation"]).startswith("flash")
    if flash and not stateful:  # flash attention takes the boundaries that TRL gives, and does not run on every machine
        return []
    layers = f" (layers of the type {', '.join(stateful)})" if stateful else ""
    try:
        change = _change_of_small_copy(case)
    except Exception as error:  # of the model's own code, on sizes that it may never have seen
        if isinstance(error, ValueError) and "packed" in str(error):  # transformers knows that it would be wrong
            what = f"`{key}: true` is wrong for {case.config.model_type} here{layers}: {first_line(error)}"
            return [Trap(what.rstrip("."), f"{_boundaries(case, key)}, or install what is missing")]
        raise CannotCheckError(f"a small copy of the model could not be run{layers}: {first_line(error)}") from error
    if change < LEAST_CHANGE:
        return []
    other = "" if stateful else ', or `attn_implementation: "flash_attention_2"`'
    return [
        Trap(
            f"`{key}: true`, but a document changes what {case.config.model_type} computes for the next one in its row"
            f"{layers}: logits of a small copy move by {change:.1g} of the largest, while the loss looks healthy",
            f"{_boundaries(case, key)}{other}",
        )
    ]


def _boundaries(case: Case, key: str) -> str:
    """What keeps documents apart: our kernels, where they would and are switched off, or no packing."""
    if not case.values["use_liger_kernel"]:
        with contextlib.suppress(Exception):  # of the model's own code, as before
            if _change_of_small_copy(case.having(use_liger_kernel=True)) < LEAST_CHANGE:
                return f"`use_liger_kernel: true`, whose kernels begin anew with each document, or `{key}: false`"
    return f"`{key}: false`"


def _stateful(config: PreTrainedConfig) -> list[str]:
    """The types of layers that are no attention, but may carry a state from one document to the next."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kind for kind in kinds if not kind.endswith("attention") or kind.startswith("linear"))


def _change_of_small_copy(case: Case) -> float:
    """[`_change`] of a small copy of the model."""
    model, _ = _small_copy(case)
    with torch.random.fork_rng(), model.device:
        torch.manual_seed(0)
        return _change(model)


def _small_copy(case: Case) -> tuple[Any, KernelReport | None]:
    """The model with small sizes and random weights, on a GPU if there is one, and what our kernels took of it."""
    config = small_config(copy.deepcopy(case.config))
    asked = case.values["attn_implementation"]
    named = None if asked in (None, "auto") or str(asked).startswith("flash") else asked
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        model = model_class(config).from_config(config, attn_implementation=named).float().eval()
        ours = named is None and case.values["use_liger_kernel"]
        return model, apply_liger_kernel(model, kernels_of(case.values, case.source)) if ours else None


@torch.no_grad()
def _change(model: Any) -> float:
    """How much the logits of a document change with the document before it, relative to the largest."""
    first, other, last = torch.randint(1, 60, (3, _LENGTH)).tolist()
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)  # TRL's, of packed rows

    def logits(before: list[int]) -> torch.Tensor:
        batch = collator([{"input_ids": ids, "labels": ids} for ids in (before, last)])
        del batch["labels"]
        inputs = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}
        return model(**inputs, use_cache=False).logits[:, _LENGTH:]

    one, two = logits(first), logits(other)
    return float((one - two).abs().max() / one.abs().max())


_ROUTERS = ("gate", "router", "shared_expert_gate")
LEAST_REACH = 0.5
"""A smaller share of a hybrid's linear layers with an adapter is a trap."""


def unreached(case: Case) -> list[Trap]:
    """Adapters on fewer than half of the linear layers of a hybrid's decoder, or on none of those of a kind of mixer.

    Fewer are a choice in a decoder of attention and MLPs, where the usual names reach both.
    """
    if not case.values["use_peft"]:
        return []
    model, _ = case.model_and_dtype
    kinds = _mixers(model)
    if not kinds:
        return []
    reached, left_out = _linear_layers(model)
    mixers = kinds & (set(left_out) - set(reached))
    count = sum(map(len, reached.values()))
    total = count + sum(map(len, left_out.values()))
    if not total or (count >= LEAST_REACH * total and not mixers):
        return []
    names = {owner: sorted(set(left_out[owner])) for owner in sorted(left_out)}
    missing = "; ".join(f"{owner}: {', '.join(found)}" for owner, found in names.items())
    return [
        Trap(
            f"`lora_target_modules` reaches {count} of the decoder's {total} linear layers, and the others stay as "
            f"they are, while the loss looks healthy. Left out are {missing}",
            f"`lora_target_modules: {_all_names(case, reached, left_out)}`",
        )
    ]


def _linear_layers(model: Any) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Names of linear layers of the decoder by the class around them: with an adapter or a trained copy, and without.

    Routers, and the linear layers of experts that are a list, are not among them.
    """
    found: tuple[dict[str, list[str]], dict[str, list[str]]] = (defaultdict(list), defaultdict(list))
    for layer in decoder_layers(model):
        for path, module in layer.named_modules():
            parts = path.split(".")
            place = [part for part in parts if part not in ("base_layer", "original_module")]
            wrapped = len(place) < len(parts)
            inside = any(part.startswith("lora_") or part in ("experts", "modules_to_save") for part in place)
            if isinstance(module, nn.Linear) and not inside and place[-1] not in _ROUTERS:
                owner = type(layer.get_submodule(".".join(place[:-1]))).__name__
                found[0 if wrapped else 1][owner].append(place[-1])
    return found


def _mixers(model: Any) -> set[str]:
    """Classes of the decoder's layers that mix tokens without attention."""
    return {type(each).__name__ for each in decoder_layers(model).modules() if is_mixer(each)}


def _all_names(case: Case, *layers: dict[str, list[str]]) -> str:
    """Every name that PEFT takes, as a recipe has them: of some models it refuses that of the mixers' last layer."""
    names = sorted({name for found in layers for of_owner in found.values() for name in of_owner})
    try:
        _ = case.having(lora_target_modules=names).model_and_dtype
    except RecipeError:
        names = [name for name in names if name != "out_proj"]
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


FLA = "flash-linear-attention"
_WRONG_FROM, _WRONG_TO = Version("3.4.0"), Version("3.7.1")  # of Triton; the second is right again


def wrong_package(case: Case) -> list[Trap]:
    """flash-linear-attention on a Hopper GPU with a Triton for which its gradients are wrong, or it refuses to run.

    It has a second backend, TileLang, which is right where it is installed.
    """
    triton = _triton()
    if triton is None or not _WRONG_FROM <= triton < _WRONG_TO or not _is_hopper():
        return []
    if not importlib.util.find_spec("fla") or importlib.util.find_spec("tilelang"):
        return []
    model, _ = case.model_and_dtype
    nets = sorted({type(module).__name__ for module in _delta_nets(model)})
    if not nets or _has_our_recurrence(case):
        return []
    kernels = "" if case.values["use_liger_kernel"] else ", or `use_liger_kernel: true`"
    return [
        Trap(
            f"{FLA} is installed and computes {', '.join(nets)}, but on a Hopper GPU with Triton {triton} its "
            "gradients are wrong; newer versions of it refuse to run",
            f"Triton {_WRONG_TO} or newer{kernels}",
        )
    ]


def _triton() -> Version | None:
    try:
        return Version(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _delta_nets(model: Any) -> Iterator[nn.Module]:
    """Modules with decays and without the skip of Mamba 2: gated delta nets, which the package is for."""
    for module in decoder_layers(model).modules():
        if hasattr(module, "A_log") and not hasattr(module, "D"):
            yield module


def _has_our_recurrence(case: Case) -> bool:
    """Whether our kernels take the recurrences of a small copy."""
    if not case.values["use_liger_kernel"]:
        return False
    try:
        _, report = _small_copy(case)
    except Exception as error:  # of the model's own code, on sizes that it may never have seen
        raise CannotCheckError(f"a small copy of the model could not be made: {first_line(error)}") from error
    return report is not None and any(row.component == "recurrence" and row.kernel is not None for row in report.rows)
