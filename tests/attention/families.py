"""Tiny models of many families with small windows, and the kinds of batch that attention has to tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from tests.tiny_models import COMMON, TINY_MODELS, _build

Batch = dict[str, Any]

LENGTH = 12
PACKED = ((5, 3, 4), (2, 9, 1))
"""The lengths of the documents of each row of a packed batch."""
WINDOWS = (3, 8)
"""Smaller than most documents; larger than all but one, and smaller than a row."""

_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_EIGHT = {"head_dim": 8}


_LATENT: dict[str, Any] = {
    **{"moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4},
    **{"index_topk": 64, "index_n_heads": 4, "index_head_dim": 16},
}


class Family(NamedTuple):
    """How to build a tiny model.

    Args:
        fields: Fields of the (text) config, added to those of `tests.tiny_models`.
        window: The field that holds the window, or the size of a chunk; None where every layer sees all before it.
        auto: The class that builds it.
        positions: Whether its masks hear of `position_ids`, without which packed documents see each other.
    """

    fields: Mapping[str, Any] = MappingProxyType({})
    window: str | None = None
    auto: Any = AutoModelForCausalLM
    positions: bool = True


TAKEN: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(window="sliding_window"),
    "qwen2": Family({"use_sliding_window": True, **_MIXED}, "sliding_window"),
    "qwen3": Family({"use_sliding_window": True, **_MIXED}, "sliding_window"),
    "qwen3_moe": Family({"output_router_logits": False}),
    "mixtral": Family({"output_router_logits": False}, "sliding_window"),
    "gemma": Family(),
    "gemma2": Family({**_MIXED, "attn_logit_softcapping": 5.0}, "sliding_window"),
    "gemma3_text": Family(_MIXED, "sliding_window"),
    "gemma3": Family(_MIXED, "sliding_window"),
    "cohere": Family(),
    "cohere2": Family({**_MIXED, "logit_scale": 0.25}, "sliding_window"),
    "olmo2": Family(),
    "olmo3": Family(_MIXED, "sliding_window"),
    "smollm3": Family({"use_sliding_window": True, "no_rope_layers": [1, 0], **_MIXED}, "sliding_window"),
    "exaone4": Family(_MIXED, "sliding_window"),
    "phi3": Family(window="sliding_window"),
    "gpt_oss": Family(_MIXED, "sliding_window", positions=False),
    "granite_swa": Family({**_MIXED, "attention_multiplier": 0.3}, "sliding_window"),
    "granite": Family({"attention_multiplier": 0.3}),
    "glm4": Family(),
    "starcoder2": Family(window="sliding_window"),
    "gpt2": Family(dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)),
    "llama4_text": Family(
        {
            **_EIGHT,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "attention_chunk_size",
    ),
    # Sparse: no document is longer than what the indexer selects; see `test_indexed.py` for longer ones.
    "deepseek_v32": Family(_LATENT),
    "glm_moe_dsa": Family(
        {
            **_LATENT,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
            "num_hidden_layers": 3,
        }
    ),
    "axk2": Family(_LATENT),
    "hy_v4": Family(_LATENT),
    "dots3_note_text": Family(_LATENT),
}
LEFT_ALONE: dict[str, Family] = {
    "bloom": Family({"n_head": 4}),
    "falcon": Family(),
    "bert": Family(auto=AutoModelForMaskedLM),
    "t5": Family(
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        auto=AutoModelForSeq2SeqLM,
    ),
}


def build(name: str, window: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A tiny model of a family; the weights are the same at every call."""
    family = {**TAKEN, **LEFT_ALONE}[name]
    fields = {**family.fields, **({family.window: window} if window else {}), **overrides}
    if name in TINY_MODELS:
        return TINY_MODELS[name](**fields)
    config = AutoConfig.for_model(name, **{**COMMON, **fields})
    return _build(family.auto._model_mapping[type(config)], config)


def _inputs(seed: int = 1, rows: int = 2) -> Batch:
    ids = torch.randint(3, 110, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def full() -> Batch:
    """Two rows without padding; the labels of a prompt are ignored."""
    batch = _inputs()
    batch["labels"][0, :3] = -100
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def padded(side: str) -> Batch:
    """A row without padding, one with four tokens of it, and one with nothing else."""
    batch = _inputs(rows=3)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -4:] = 0
    mask[2] = 0
    if side == "left":
        mask = mask.flip(1)
    batch["input_ids"][mask == 0] = 0
    batch["labels"][mask == 0] = -100
    # The first real token has no predecessor: a padded query, which attends to anything, would predict it.
    batch["labels"][:, 1:][mask[:, :-1] == 0] = -100
    return {**batch, "attention_mask": mask}


def packed(lengths: tuple[tuple[int, ...], ...] = PACKED) -> Batch:
    """Rows of several documents, whose positions start anew.

    Without a cache, as trainers have it, and with which transformers looks for no documents.
    """
    batch = _inputs(rows=len(lengths))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    batch["labels"][positions == 0] = -100
    return {**batch, "position_ids": positions, "use_cache": False}


def documents(batch: Batch) -> Iterator[Batch]:
    """Those of a packed batch, each as a batch of its own, longer than a token."""
    for row in range(len(batch["input_ids"])):
        starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            if end - start > 1:
                yield {key: batch[key][row : row + 1, start:end] for key in ("input_ids", "labels")}


BATCHES: dict[str, Callable[[], Batch]] = {
    "full": full,
    "right-padded": lambda: padded("right"),
    "left-padded": lambda: padded("left"),
    "packed": packed,
}
