"""Warns before an adapter is merged into a weight that embedding and head share."""

from __future__ import annotations

import logging

from torch import nn

from liger_trainer.head.lm_head import adapts_tied_weight

logger = logging.getLogger("liger_trainer")


def warn_of_tied_adapters(model: nn.Module) -> None:
    """Warns if an adapter is on the head or on the embedding of a model that ties the two.

    Training is right. But PEFT's merge adds the adapter to the weight that both use, and adds it twice if
    `ensure_weight_tying` has put it on both.
    """
    if adapts_tied_weight(model):
        logger.warning(
            "The LM head is tied to the embedding, and an adapter is on one of them or both. Training is right, but "
            "PEFT's `merge_and_unload()` would change both, since they share a weight (with `ensure_weight_tying` "
            "even twice), so the merged model would compute other logits. Merge with `liger-trainer merge`, or untie "
            "the head before you merge: `head = model.get_output_embeddings(); "
            "head = getattr(head, 'token_adapter', head); head = getattr(head, 'base_layer', head); "
            "head.weight = torch.nn.Parameter(head.weight.detach().clone())`."
        )
