"""The modules that no kernel is for, such as Mamba's mixers: the report names them, with their share of the parameters.

Such a module has a class of its own, and more parameters in itself and in plain layers (linear, convolution) than in
other modules inside it. Plain layers alone, embeddings and heads need no row, and neither does what a finding is about.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from liger_trainer.head.lm_head import find_lm_heads, without_adapters
from liger_trainer.patching.finding import Finding
from liger_trainer.patching.probe import class_of, full_shape, is_stateless
from liger_trainer.patching.report import KernelReportRow

WITHOUT_A_GATE = "MLPs without a gate"
"""What the reason says of two projections with an activation between them.

A kernel would save no time where torch computes the activation in one pass. Recomputing it would save one tensor of the
intermediate size: a fifth to a quarter of what a layer saves, and nothing that outlives a checkpointed layer.
"""

_OF_PLAIN_LAYERS = ("fp8", "lora")


def unserved(model: nn.Module, findings: Iterable[Finding]) -> list[KernelReportRow]:
    """A row for each class of `model` that no kernel is for, the largest first.

    Args:
        model: The model.
        findings: What was found in it.
    """
    base = without_adapters(model)
    findings, heads = list(findings), set(map(id, find_lm_heads(base)[0]))
    found = heads | {id(finding.module) for finding in findings}
    apart = heads | {id(finding.module) for finding in findings if finding.component not in _OF_PLAIN_LAYERS}
    sizes = {id(module): 0 for module in model.modules()}
    total = _add_sizes(model, sizes)
    counts: dict[tuple[str, str], list[int]] = {}
    for module in model.modules():
        if module in (model, base) or id(module) in found or _is_plain(module) or _may_hold_an_adapter(module):
            continue
        embeddings = sum(sizes[id(each)] for each in module.modules() if isinstance(each, nn.Embedding))
        own = _own_size(module, apart)
        if own and own >= sizes[id(module)] - embeddings - own:
            what = WITHOUT_A_GATE if _is_mlp_without_a_gate(module) else "it"
            counts.setdefault((class_of(module).__name__, what), []).append(own)
    rows = [
        KernelReportRow("other", name, len(own), None, None, _reason(what, sum(own) / total), sum(own) / total)
        for (name, what), own in counts.items()
    ]
    return sorted(rows, key=lambda row: row.share or 0.0, reverse=True)


def _reason(what: str, share: float) -> str:
    percentage = f"{100 * share:.1f} %" if share >= 5e-4 else "less than 0.1 %"
    return f"there is no kernel for {what}, with {percentage} of the parameters"


def _add_sizes(module: nn.Module, sizes: dict[int, int]) -> int:
    """Writes how many parameters each module in `module` has, with those inside it, and returns that of `module`."""
    size = _direct_size(module) + sum(
        _add_sizes(child, sizes) for child in module._modules.values() if child is not None
    )
    sizes[id(module)] = size
    return size


def _direct_size(module: nn.Module) -> int:
    return sum(math.prod(full_shape(each)) for each in module._parameters.values() if each is not None)


def _own_size(module: nn.Module, apart: Collection[int]) -> int:
    """The parameters of `module` and of the plain layers directly in it, without those with these ids."""
    size = _direct_size(module)
    for child in module._modules.values():
        if child is not None and _is_plain(child) and id(child) not in apart and not isinstance(child, nn.Embedding):
            size += _own_size(child, apart)
    return size


def _is_mlp_without_a_gate(module: nn.Module) -> bool:
    """Whether `module` is a projection to a larger size, one back, and what has no parameters."""
    children = [child for child in module._modules.values() if child is not None]
    layers = [child for child in children if not is_stateless(child)]
    if len(layers) != 2 or not all(map(_is_plain, layers)):
        return False
    (hidden, intermediate), ends = map(_features, layers)
    return None not in (hidden, intermediate) and ends == (intermediate, hidden) and intermediate > hidden


def _features(layer: nn.Module) -> tuple[Any, Any]:
    """The sizes of the input and the output of a linear layer, which GPT-2's calls nx and nf; None if it has none."""
    given = [getattr(layer, name, None) for name in ("in_features", "nx", "out_features", "nf")]
    return given[0] or given[1], given[2] or given[3]


def _may_hold_an_adapter(module: nn.Module) -> bool:
    """Whether `module` is one of LitGPT's LoRA layers, which is a linear layer where it has no adapter."""
    return isinstance(getattr(module, "linear", None), nn.Linear) and hasattr(module, "lora_alpha")


def _is_plain(module: nn.Module) -> bool:
    """Whether `module` is a layer or a container of torch, also a quantised one, or an adapter around one."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())  # GPT-2's linear layer
    return isinstance(module, (nn.Linear, nn.Embedding, conv1d)) or class_of(module).__module__.split(".")[0] in (
        "torch",
        "peft",
    )
