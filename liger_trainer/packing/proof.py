"""Whether a model computes the same for a packed row as for the padded batch: tried on a small copy of it.

The copy is of the model's class, with the kinds of layers of its config and random weights, on the CPU. The real model
is not run. A padded batch with padding on both sides, shared beginnings, and a row inside another goes through the copy
with transformers' own masks and attention, and as packed rows, with and without sharing. Logits (hidden states, without
a head), the router's loss and the gradients of all parameters must agree; so must the scores of a reward model, each
taken at the token that its class treats as the last one.

In the config of the copy, what decides how tokens are mixed stays: the kinds of layers, windows and chunks (shorter
than the rows of a proof), the size of heads and how much of it is rotated, in which sections. Many sizes have to fit
that of the heads, and some are written in the model's code; so there are fewer heads, of the size that they have.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from liger_trainer.attention.interface import NAME, NotPackable, has_our_attention
from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import ATTENTION
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.packing.packed_row import Padded, packed_rows, rows_of
from liger_trainer.packing.packing import NOT_OURS
from liger_trainer.patching.probe import Agreement, drawing_apart, few_threads
from liger_trainer.patching.recurrent.find import mixers_in_torch, mixers_of, mixers_patched, reason_against_mixers

_HEADS, _HIDDEN = 4, 32
_EXPERTS, _EXPERTS_A_TOKEN = 4, 2
_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
_MAMBA_SIZES = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
_MOST = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "zero_expert_num": 2,
    "moe_num_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS_A_TOKEN,
    "moe_k": _EXPERTS_A_TOKEN,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 5,
    "attention_chunk_size": 6,
    "floor_scale": 3,
    "original_max_position_embeddings": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_heads": _HEADS,
    "linear_head_dim": 8,
    **dict.fromkeys(_MAMBA_HEADS, 8),
    **dict.fromkeys(_MAMBA_SIZES, 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 4),
    "mamba_d_ssm": 64,
    "num_labels": 1,
    "num_layers_per_stack": 1,  # of layers that run several times each, which magnifies rounding
}
"""What the small config has instead of a larger number. The windows and chunks are shorter than rows, and so are the
lengths from which models scale queries by their position."""


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same kind, with small sizes, and a layer of each of its kinds, two at least.

    That of a model of images and text has a small config for each.
    """
    small = fewer_layers(config)
    if config.get_text_config() is not config:
        for name in config.sub_configs:
            if (inside := getattr(config, name, None)) is not None:
                setattr(small, name, small_config(inside))
        return small
    vars(small).pop("quantization_config", None)
    differing = getattr(config, "per_layer_attributes", None)  # sizes that differ between layers, in Gemma 4
    if differing:
        small.per_layer_config = None
    kept = kept_layers(config)
    most = {config.attribute_map.get(name, name): size for name, size in _MOST.items()}
    for name, value in vars(small).items():
        if isinstance(value, dict) and name.startswith("rope"):
            setattr(small, name, dict(_smaller_entries(value)))
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(small, name, min(value, _MOST["vocab_size"] - 1))
        elif "dropout" in name and isinstance(value, float):
            setattr(small, name, 0.0)
        else:
            setattr(small, name, _smaller(value, most.get(name)))
    # A state-space model has no heads.
    heads, key_heads = _written(config, "num_attention_heads"), _written(config, "num_key_value_heads")
    size = _written(config, "head_dim") or (config.hidden_size // heads if heads else 0)
    small.hidden_size = _HEADS * size if heads and config.hidden_size // heads == size else _HIDDEN
    small.num_attention_heads = _HEADS
    if key_heads is not None:
        small.num_key_value_heads = _key_heads(key_heads, heads)
    _fit_recurrences(small)
    if getattr(config, "initializer_range", None):
        small.initializer_range = 0.1  # so that attention prefers keys
    small.pad_token_id = 0
    if differing:
        small.per_layer_config = {place: _own_sizes(config, layer, differing, most) for place, layer in enumerate(kept)}
    return small


def fewer_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same sizes with a layer of each of its kinds, two at least; so of each of its parts."""
    fewer = copy.deepcopy(config)
    if config.get_text_config() is not config:
        for name in config.sub_configs:
            if (inside := getattr(config, name, None)) is not None:
                setattr(fewer, name, fewer_layers(inside))
        return fewer
    layers, kept = _layers_of(config), kept_layers(config)
    if not layers:
        return fewer
    differing = getattr(config, "per_layer_attributes", None)
    if differing:
        fewer.per_layer_config = None  # with it, asking for such a size is an error
    for name, value in vars(fewer).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(fewer, name, [value[layer] for layer in kept])
    fewer.num_hidden_layers = len(kept)
    if getattr(config, "num_kv_shared_layers", 0):
        fewer.num_kv_shared_layers = sum(layer >= layers - config.num_kv_shared_layers for layer in kept)
    for name in ("attn_layer_indices", "hybrid_layer_ids"):
        if (numbers := _written(config, name)) is not None:
            setattr(fewer, name, [place for place, layer in enumerate(kept) if layer in numbers])
    if differing:
        own = (config.per_layer_config[layer] for layer in kept)
        fewer.per_layer_config = {
            place: {name: getattr(each, name) for name in differing} for place, each in enumerate(own)
        }
    return fewer


def _layers_of(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_hidden_layers", None) or 0)  # a part between others may have none


def _fit_recurrences(small: PreTrainedConfig) -> None:
    """Gives layers the sizes that fit those of the hidden states, where a config has a ratio of the two."""
    values, keys = _written(small, "linear_num_value_heads"), _written(small, "linear_num_key_heads")
    if values is not None and values % keys:
        small.linear_num_value_heads = keys
    expand = _written(small, "mamba_expand")
    heads = [name for name in _MAMBA_HEADS if _written(small, name) is not None]  # Mamba 1 has none
    if expand is not None and heads and not _written(small, "mamba_d_ssm"):
        size = next(name for name in _MAMBA_SIZES if _written(small, name) is not None)
        setattr(small, heads[0], int(expand * small.hidden_size) // getattr(small, size))
    if _written(small, "attention_hidden_size") is not None:  # of what goes into attention: two hidden states
        small.attention_hidden_size = 2 * small.hidden_size
        small.attention_head_dim = small.attention_hidden_size // _HEADS


def _key_heads(key_heads: int, heads: int) -> int:
    return _HEADS if key_heads == heads else (1 if key_heads == 1 else 2)


def _own_sizes(config: PreTrainedConfig, layer: int, names: Iterable[str], most: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of a layer that differ between layers, by their names, made small."""
    own = config.per_layer_config[layer]
    sizes = {name: _smaller(getattr(own, name), most.get(name)) for name in names}
    if "num_attention_heads" in sizes:
        sizes["num_attention_heads"] = _HEADS
    if "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = _key_heads(own.num_key_value_heads, own.num_attention_heads)
    return sizes


def _written(config: PreTrainedConfig, name: str) -> Any:
    """What is written in the config, where asking for it may be an error: of a size that differs between layers."""
    return vars(config).get(config.attribute_map.get(name, name))


def kept_layers(config: PreTrainedConfig) -> list[int]:
    """The first two layers, and the first of each kind: by its types, and by whether it has keys of an earlier one."""
    layers = _layers_of(config)
    own = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    lists = [*vars(config).values(), getattr(config, "layer_types", None)]  # the last may be made of other fields
    types = [value for value in lists if isinstance(value, list) and len(value) == layers]
    types = [value for value in types if all(isinstance(each, str) for each in value)]
    kinds = [(layer >= own, *(value[layer] for value in types)) for layer in range(layers)]
    return sorted({kinds.index(kind) for kind in kinds} | set(range(min(2, layers))))


def _smaller(value: Any, most: int | None) -> Any:
    """A number, or each of a list, at most as large; all else, and 0, as it is."""
    if isinstance(value, list):
        return [_smaller(each, most) for each in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return min(value, most) if is_number and value and most is not None else value


def _smaller_entries(rope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a config's `rope_parameters`, which may be nested by type of layer."""
    for name, value in rope.items():
        yield name, dict(_smaller_entries(value)) if isinstance(value, dict) else _smaller(value, _MOST.get(name))


_Outputs = tuple[torch.Tensor, Any]
"""The values that are compared, and all that the model returned."""

TOLERANCE = 1e-4
"""Largest relative difference in float32, of values and gradients."""

# Some models magnify rounding: theirs may differ as much as from another rounding of their weights, up to a limit.
_MOST_NOISE, _TIMES_NOISE = 1e-3, 4.0
_DRAWS = 3
"""Of weights, at most, where one is off by no more than rounding may be: a gradient may be a sum that cancels."""

_KNOWN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "conv", "linear_attention", "hybrid", "mlp", "moe"}
    | {"indexed_attention"}
)
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_LENGTH = 14


def prove_packing(model: Any) -> Agreement:
    """Compares a small copy of `model` on a padded batch with the same on packed rows.

    Args:
        model: A transformers model, without PEFT's wrapper: a causal language model, or one without a head.
    """
    return _proved(model, _compared_tokens)


def prove_scores(model: Any, pack: Callable[[Any, bool | None], None]) -> Agreement:
    """Compares the scores of a small copy of `model` on a padded batch with those of packed rows.

    In the batch are padding on both sides, and a sequence whose own last token is the padding token.

    Args:
        model: A transformers model that scores sequences, for whose backbone [`prove_packing`] holds.
        pack: Gives a model a forward that packs its batches, with whether rows share their beginnings; None gives the
            forward of its class.
    """
    return _proved(model, functools.partial(_compared_scores, pack=pack))


def _proved(model: Any, compared: Callable[[Any], Agreement]) -> Agreement:
    reason = _reason_against(model)
    if reason:
        return _refused(reason)
    try:
        with few_threads(), drawing_apart(torch.device("cpu")), torch.device("cpu"):
            for draw in range(_DRAWS):
                torch.manual_seed(draw)
                agreement = compared(_small_copy(model))
                if agreement.equal or agreement.error > _MOST_NOISE:
                    break
        return agreement
    except NotPackable as mask:
        return _refused(f"it has {mask}")
    except Exception as error:  # of the model's own code, on a config that it may never have seen
        return _refused(f"a small copy of it could not be run: {type(error).__name__}: {str(error).strip()[:120]}")


def _refused(reason: str) -> Agreement:
    return Agreement(float("inf"), reason=reason)


def _reason_against(model: Any) -> str:
    if not isinstance(model, PreTrainedModel):
        return "it is not a transformers model"
    if not available(ATTENTION):
        return "this version of transformers names its attention in another way"
    config = model.config.get_text_config()
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if unknown:
        return f"it has layers of the type {', '.join(unknown)}"
    if set(_rope_types(getattr(config, "rope_parameters", None))) & _LENGTH_DEPENDENT:
        return "its rotary embedding depends on the length of the longest row"
    return reason_against_mixers(model) or ("" if has_our_attention(model) else NOT_OURS)


def _rope_types(parameters: Any) -> Iterator[str]:
    """The types in a config's `rope_parameters`, which may be nested by type of layer."""
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for each in parameters.values():
            yield from _rope_types(each)


def _small_copy(model: PreTrainedModel) -> nn.Module:
    config = small_config(model.config)
    config._attn_implementation = "eager"
    small = type(model)(config).float().eval()
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if name.endswith("A_log"):  # slow decays, so that states last, and their gradients do not cancel
                parameter.copy_(torch.linspace(-4.0, 0.0, parameter.numel()).view_as(parameter))
    return small


def _batch() -> Padded:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 60, (8, _LENGTH), generator=generator)
    ids[1, :7] = ids[0, :7]
    ids[2, :11] = ids[1, :11]  # more than with row 0: a second level, copied keys of two
    ids[4, 3:10] = ids[3, 3:10]
    ids[7, 1:3] = ids[6, 1:3]  # fewer than the taps of a convolution
    begins, ends = (0, 0, 0, 3, 3, 2, 1, 1), (14, 12, 13, 14, 10, 9, 12, 9)  # row 4 is the beginning of row 3
    columns = torch.arange(_LENGTH)
    mask = (columns >= torch.tensor(begins)[:, None]) & (columns < torch.tensor(ends)[:, None])
    ids = ids.masked_fill(~mask, 0)
    labels = ids.roll(-1, 1).masked_fill(~mask, IGNORE_INDEX)
    return Padded(ids, mask.long(), None, labels)


def _compared_tokens(model: Any) -> Agreement:
    batch = _batch()
    options = {"use_cache": False}
    if getattr(model.config.get_text_config(), "output_router_logits", None) is not None:
        options["output_router_logits"] = True

    def padded() -> _Outputs:
        outputs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **options)
        return _values(outputs)[batch.labels != IGNORE_INDEX], outputs

    def packed(share: bool) -> _Outputs:
        rows = packed_rows(batch, share, one_level=bool(mixers_of(model)))
        assert rows is not None  # there is no padding between tokens
        row = rows[0]
        with row.attended():
            outputs = model(**row.inputs, **options)
        return rows_of(_values(outputs), row.scored.tokens)[row.scored.copies.index.long()], outputs

    return _agreement(model, padded, packed)


def _compared_scores(model: Any, pack: Callable[[Any, bool | None], None]) -> Agreement:
    batch = _batch()
    batch.input_ids[0, -1] = model.config.get_text_config().pad_token_id
    rows: list[int] = []  # of the last forward of the model inside

    def scored(share: bool | None) -> _Outputs:
        pack(model, share)
        outputs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        if share is not None and rows[-1] != 1:
            raise NotPackable("scores that are not of packed rows")
        return outputs.logits, outputs

    inside = getattr(model, model.base_model_prefix)
    inside.register_forward_hook(lambda module, args, outputs: rows.append(len(outputs.last_hidden_state)))
    return _agreement(model, functools.partial(scored, None), scored)


def _agreement(model: Any, padded: Callable[[], _Outputs], packed: Callable[[bool], _Outputs]) -> Agreement:
    """Compares the values of a batch, and all of their gradients, with those of packed rows, shared and not."""
    with mixers_in_torch(model):
        values, outputs = padded()
        weights = torch.randn(values.shape)
        wanted = _results(model, values, outputs, weights)
    own = model.config.get_text_config()._attn_implementation
    model.config.get_text_config()._attn_implementation = {"": NAME}
    with mixers_patched(model):
        error = max(_difference(wanted, _results(model, *packed(share), weights)) for share in (False, True))
    if TOLERANCE < error <= _MOST_NOISE:
        model.config.get_text_config()._attn_implementation = {"": own}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.randn_like(parameter).sign() * torch.finfo(parameter.dtype).eps)
        with mixers_in_torch(model):
            if error <= _TIMES_NOISE * _difference(wanted, _results(model, *padded(), weights)):
                return Agreement(error)
    return Agreement(error, reason="" if error <= TOLERANCE else f"packed rows give other values ({error:.1e})")


def _values(outputs: Any) -> torch.Tensor:
    """What the model computes for each token."""
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def _results(model: nn.Module, values: torch.Tensor, outputs: Any, weights: torch.Tensor) -> list[torch.Tensor | None]:
    """The values, the router's loss, and the gradients of all parameters; None for those that have no part in them."""
    aux_loss = getattr(outputs, "aux_loss", None)
    loss = (values * weights).sum() + (0.0 if aux_loss is None else aux_loss)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [values.detach(), *([] if aux_loss is None else [aux_loss.detach()]), *gradients]


def _difference(expected: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> float:
    """The largest difference of two tensors, relative to what is expected; no gradient is one of zeros."""
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        if one is None and other is None:
            continue
        one, other = (torch.zeros(()) if each is None else each for each in (one, other))
        difference = float((other - one).abs().amax()) / (float(one.abs().amax()) or 1.0)
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest
