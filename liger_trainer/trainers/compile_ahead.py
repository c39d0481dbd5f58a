"""The kernels of the first step, compiled side by side while its trainer is built.

The proofs have compiled kernels for the sizes of a dummy and for gradients of all tensors. Triton compiles a kernel
again for the sizes of a model and for frozen weights. So a copy of the model with a layer of each kind takes a step
here. The kernels that it launches are compiled, and do not run; its results are thrown away. The copy shares the memory
of the model's parameters, and has no hooks.

Nothing is compiled ahead for models some of whose weights are quantised, split or on another device, nor are kernels
that only a separate reference model or a teacher launches. Whatever fails is left to the first step.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from liger_trainer.configs.caller_warnings import hidden_warnings
from liger_trainer.head.lm_head import PLAIN, output_embedding, without_adapters
from liger_trainer.kernels.compile_together import compiler_for
from liger_trainer.packing.proof import fewer_layers, kept_layers
from liger_trainer.patching.fp8 import decoder_layers
from liger_trainer.patching.probe import HOOKS, neutral
from liger_trainer.trainers.fused_forward import StatisticsOptions, token_statistics

logger = logging.getLogger("liger_trainer")

_DTYPES = {torch.bfloat16, torch.float16, torch.float32}
_TOKENS = 16384  # of a batch, at most: as for a larger one, the logits take several chunks


def compile_ahead(trainer: Any, model: nn.Module) -> None:
    """Compiles the kernels that the first step of `trainer` will launch, as far as they are known.

    Args:
        trainer: A trainer with `train_dataset`; without data nothing is compiled.
        model: The model of `trainer`, to which the kernels are bound, with its adapters.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if getattr(trainer, "train_dataset", None) is None or not _is_usual(model, device):
        return
    with compiler_for(device) as compiler:
        if compiler is None:
            return
        with neutral(device), hidden_warnings(), compiler.noting(), trainer.autocast_smart_context_manager():
            try:
                _take_a_step(trainer, model, device)
            except Exception as error:  # the model's own, or too little memory: the first step then compiles
                logger.debug("The kernels of the first step were not compiled ahead: %s", error)
        compiler.wait()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()  # of the results


def _take_a_step(trainer: Any, model: nn.Module, device: torch.device) -> None:
    few = few_layers(model)
    base: Any = without_adapters(few)
    tokens = torch.zeros(_batch(trainer, base.config), dtype=torch.long, device=device)
    of_labels = trainer._own_loss_is_of_labels or not trainer._has_own_loss
    # Without a head for tokens a model scores rows; or the head is TRL's own.
    if output_embedding(base) is None or (not of_labels and trainer._statistics is None):
        loss = base.get_decoder()(tokens, use_cache=False).last_hidden_state.sum()
    elif of_labels:
        loss = few(input_ids=tokens, labels=tokens, use_cache=False).loss
    else:
        with torch.no_grad():  # as of a base without its adapters, or of the model that sampled
            _log_probs(few, tokens, trainer._statistics)
        loss = _log_probs(few, tokens, trainer._statistics).sum()
    loss.backward()


def _log_probs(model: nn.Module, tokens: torch.Tensor, options: StatisticsOptions) -> torch.Tensor:
    return token_statistics(model(input_ids=tokens, use_cache=False).logits, tokens, options).log_probs


def _is_usual(model: nn.Module, device: torch.device) -> bool:
    """Whether all tensors of `model` are plain numbers on `device`, none of them empty, and some of them trained."""
    tensors = [*model.parameters(), *model.buffers()]
    usual = all(type(each) in PLAIN and each.device == device and each.numel() for each in tensors)
    numbers = all(each.dtype in _DTYPES for each in model.parameters())
    return usual and numbers and any(each.requires_grad for each in tensors)


def _batch(trainer: Any, config: PreTrainedConfig) -> tuple[int, int]:
    """Rows, and tokens of a row: as many as the trainer and the model allow, and at most `_TOKENS` in all."""
    rows = min(trainer.args.per_device_train_batch_size, _TOKENS)
    config = config.get_text_config()
    most = (getattr(trainer.args, "max_length", None), getattr(config, "max_position_embeddings", None))
    return rows, min([_TOKENS // rows, *filter(None, most)])


def few_layers(model: nn.Module) -> nn.Module:
    """A copy of `model` that has a layer of each kind, and shares the memory of its parameters.

    Args:
        model: A model of transformers, or PEFT's wrapper of one.

    Raises:
        ValueError: if it has no decoder with the layers that its config counts.
    """
    base, layers = without_adapters(model), decoder_layers(model)
    if not isinstance(base, PreTrainedModel) or not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(base).__name__} has no list of decoder layers.")
    text = base.config.get_text_config()
    if len(layers) != text.num_hidden_layers:
        raise ValueError(f"{type(base).__name__} has {len(layers)} layers, its config {text.num_hidden_layers}.")
    memo: dict[int, Any] = {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()}
    memo |= _by_identity(base.config, fewer_layers(base.config))
    memo[id(layers)] = nn.ModuleList(copy.deepcopy(layers[place], memo) for place in kept_layers(text))
    few = copy.deepcopy(model, memo)
    for module in few.modules():
        for name in HOOKS:
            vars(module)[name].clear()
    return few.train()


def _by_identity(config: PreTrainedConfig, fewer: PreTrainedConfig) -> dict[int, Any]:
    """`fewer` and its parts, by the `id` of those of `config`."""
    found: dict[int, Any] = {id(config): fewer}
    for name in config.sub_configs:
        if (inside := getattr(config, name, None)) is not None:
            found |= _by_identity(inside, getattr(fewer, name))
    return found
