"""Warns before an adapter is merged into a weight that embedding and head share."""

from __future__ import annotations

import logging

from torch import nn

from liger_trainer.head.lm_head import adapts_tied_weight

logger = logging.getLogger("liger_trainer")


def warn_of_tied_adapters(model: nn.Module) -> None:
    """Warns where an adapter is on the head or on the embedding of a model that ties the two.

    The training is right. But PEFT's merge adds the adapter to the weight that both use, and adds it twice where
    `ensure_weight_tying` has put it on both.
    """
    if adapts_tied_weight(model):
        logger.warning(
            "The LM head is tied to the embedding, and an adapter is on one of them or both. It trains as it should, "
            "but PEFT's `merge_and_unload()` would change both by changing the weight they share, with "
            "`ensure_weight_tying` twice, so the merged model would compute other logits. Untie the head before you "
            "merge: `head = model.get_output_embeddings(); head = getattr(head, 'base_layer', head); "
            "head.weight = torch.nn.Parameter(head.weight.detach().clone())`."
        )
