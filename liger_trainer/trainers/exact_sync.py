"""Adapters merged into their base for vLLM, one layer at a time, without a changed bit in the base.

TRL merges all adapters, sends the weights, and subtracts the adapters again. In bf16 that is not what was there before:
after 200 such syncs half of the weights of a bf16 base are other numbers. Here TRL's loop over the parameters meets a
layer whose merged weights are copies; after they were sent, the layer has its own again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from liger_trainer.compat.peft import MERGED_ADAPTERS
from liger_trainer.compat.private import available
from liger_trainer.compat.trl import MERGED_SYNC

logger = logging.getLogger("liger_trainer")


def keep_base_bits(trainer: Any) -> None:
    """Makes the vLLM client of `trainer`, if it has one, send merged adapters and leave the base as it is."""
    vllm = getattr(trainer, "vllm_generation", None)
    if vllm is None or not hasattr(trainer.model, "merge_adapter"):
        return
    if trainer.is_fsdp_enabled and vllm._dist.fsdp_version == 1:
        # Its loop reads the parameters of each FSDP unit, not those of the model.
        logger.warning(
            "vLLM gets the adapters merged into their base, and FSDP 1 subtracts them again afterwards, which rounds: "
            "the base drifts with every sync. Use FSDP 2 (`fsdp_version: 2`), which keeps its bits."
        )
    elif available(MERGED_SYNC) and available(MERGED_ADAPTERS):
        plain = vllm._iter_named_params

        def one_at_a_time() -> Iterator[tuple[str, Any]]:
            with _merged_when_read(vllm.model):
                yield from plain()

        vllm._iter_named_params = one_at_a_time


@contextlib.contextmanager
def _merged_when_read(model: Any) -> Iterator[None]:
    """Between `model.merge_adapter()` and `unmerge_adapter()`, `named_parameters` gives merged copies."""
    own = set(vars(model))
    parameters = model.named_parameters

    def merge_adapter() -> None:
        model.base_model._check_merge_allowed()
        model.named_parameters = lambda *args, **kwargs: _merged(model, list(parameters(*args, **kwargs)))

    model.merge_adapter, model.unmerge_adapter = merge_adapter, lambda: vars(model).pop("named_parameters")
    try:
        yield
    finally:
        for name in set(vars(model)) - own:
            delattr(model, name)


def _merged(model: nn.Module, parameters: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `model`; those of an adapted layer while its adapters are merged into copies."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters: dict[int, list[Any]] = {}  # of the layers that have them, by each parameter of the base: experts have two
    for layer in (each for each in model.modules() if isinstance(each, BaseTunerLayer)):
        for parameter in layer.get_base_layer().parameters(recurse=False):
            adapters.setdefault(id(parameter), []).append(layer)
    for layers, group in itertools.groupby(parameters, lambda each: adapters.get(id(each[1]), [])):
        with _copies(layers):
            for name, parameter in group:
                yield name, model.get_parameter(name) if layers else parameter


@contextlib.contextmanager
def _copies(layers: list[Any]) -> Iterator[None]:
    """Merges the adapters of `layers`, which have one base layer, into copies of its parameters, for the context."""
    base: Any = layers[0].get_base_layer() if layers else None
    own = [(name, each, each.data) for name, each in base.named_parameters(recurse=False)] if layers else []
    merged = [list(layer.merged_adapters) for layer in layers]
    try:
        for _, parameter, data in own:
            parameter.data = data.clone()
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer, names in zip(layers, merged):
            layer.merged_adapters = names
        for name, parameter, data in own:
            parameter.data = data
            setattr(base, name, parameter)
