"""Adapters on one of two layers that share a weight."""

from __future__ import annotations

import sys
from typing import Any

from liger_trainer.head.lm_head import adapts_tied_weight
from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.trap import Trap


def tied_adapters(case: Case) -> list[Trap]:
    """LoRA on the head or the embedding of a model that ties the two, or a copy of one of them in `modules_to_save`."""
    if not case.values["use_peft"]:
        return []
    model, _ = case.model_and_dtype
    found = []
    if adapts_tied_weight(model):
        found.append(
            Trap(
                "Embedding and head share a weight, and `lora_target_modules` puts an adapter on one of them: "
                "`merge_and_unload()` adds it to both, so the merged model computes other logits than the trained one",
                'leave it out, with `lora_target_modules: "all-linear"`, or untie the head before you merge',
            )
        )
    if _saves_one_of_two(case, model):
        found.append(
            Trap(
                "Embedding and head share a weight, and `lora_modules_to_save` trains a copy of one of them alone: the "
                "other keeps the old values, and the merged model is larger by that weight",
                "`lora_modules_to_save: null`, or in a script `LoraConfig(..., ensure_weight_tying=True)`",
            )
        )
    return found


def _saves_one_of_two(case: Case, model: Any) -> bool:
    if not getattr(case.config.get_text_config(), "tie_word_embeddings", False) or "peft" not in sys.modules:
        return False
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    ends = [base.get_output_embeddings(), base.get_input_embeddings()]
    return sum(isinstance(end, ModulesToSaveWrapper) for end in ends) == 1
