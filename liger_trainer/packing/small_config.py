"""A config of the same kind as a model's with small sizes, for a copy of the model that runs on the CPU.

What decides how tokens are mixed stays: the kinds of layers, windows and chunks (shorter than the rows of a proof), the
size of heads and how much of it is rotated, in which sections. Many sizes have to fit that of the heads, and some are
written in the model's code; so there are fewer heads, of the size that they have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

_HEADS, _HIDDEN = 4, 32
_EXPERTS, _EXPERTS_A_TOKEN = 4, 2
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
    "num_labels": 1,
    "num_layers_per_stack": 1,  # of layers that run several times each, which magnifies rounding
}
"""What the small config has instead of a larger number. The windows and chunks are shorter than rows, and so are the
lengths from which models scale queries by their position."""


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same kind, with small sizes, and a layer of each of its kinds, two at least.

    That of a model of images and text has a small config for each.
    """
    small = copy.deepcopy(config)
    if config.get_text_config() is not config:
        for name in config.sub_configs:
            if (inside := getattr(config, name, None)) is not None:
                setattr(small, name, small_config(inside))
        return small
    vars(small).pop("quantization_config", None)
    differing = getattr(config, "per_layer_attributes", None)  # sizes that differ between layers, in Gemma 4
    if differing:
        small.per_layer_config = None
    layers = int(getattr(config, "num_hidden_layers", None) or 0)  # a part between others may have none
    kept = _kept_layers(config, layers)
    most = {config.attribute_map.get(name, name): size for name, size in _MOST.items()}
    for name, value in vars(small).items():
        if layers and isinstance(value, list) and len(value) == layers:
            setattr(small, name, [_smaller(value[layer], most.get(name)) for layer in kept])
        elif isinstance(value, dict) and name.startswith("rope"):
            setattr(small, name, dict(_smaller_entries(value)))
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(small, name, min(value, _MOST["vocab_size"] - 1))
        elif "dropout" in name and isinstance(value, float):
            setattr(small, name, 0.0)
        else:
            setattr(small, name, _smaller(value, most.get(name)))
    if layers:
        small.num_hidden_layers = len(kept)
    if getattr(config, "num_kv_shared_layers", 0):
        small.num_kv_shared_layers = sum(layer >= layers - config.num_kv_shared_layers for layer in kept)
    # A state-space model has no heads.
    heads, key_heads = _written(config, "num_attention_heads"), _written(config, "num_key_value_heads")
    size = _written(config, "head_dim") or (config.hidden_size // heads if heads else 0)
    small.hidden_size = _HEADS * size if heads and config.hidden_size // heads == size else _HIDDEN
    small.num_attention_heads = _HEADS
    if key_heads is not None:
        small.num_key_value_heads = _key_heads(key_heads, heads)
    if getattr(config, "initializer_range", None):
        small.initializer_range = 0.1  # so that attention prefers keys
    small.pad_token_id = 0
    if differing:
        small.per_layer_config = {place: _own_sizes(config, layer, differing, most) for place, layer in enumerate(kept)}
    return small


def _key_heads(key_heads: int, heads: int) -> int:
    return _HEADS if key_heads == heads else (1 if key_heads == 1 else 2)


def _own_sizes(config: PreTrainedConfig, layer: int, names: Iterable[str], most: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of a layer that differ between layers, by their names, made small."""
    own = config.per_layer_config[layer]
    sizes = {name: _smaller(getattr(own, name), most.get(name)) for name in names}
    if "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = _key_heads(own.num_key_value_heads, own.num_attention_heads)
    return sizes


def _written(config: PreTrainedConfig, name: str) -> Any:
    """What is written in the config, where asking for it may be an error: of a size that differs between layers."""
    return vars(config).get(config.attribute_map.get(name, name))


def _kept_layers(config: PreTrainedConfig, layers: int) -> list[int]:
    """The first two layers, and the first of each kind: by its types, and by whether it has keys of an earlier one."""
    own = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    types = [value for value in vars(config).values() if isinstance(value, list) and len(value) == layers]
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
