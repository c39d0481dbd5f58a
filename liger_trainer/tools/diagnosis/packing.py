"""Packed documents that see each other through layers with a state, tried on a small copy of the model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer.packing.small_config import small_config
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.recipe.file import first_line
from liger_trainer.recipe.model import model_class
from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.trap import CannotCheckError, Trap
from liger_trainer.tools.planning.inputs import kernels_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEAST_CHANGE = 1e-5
"""Relative change of float32 logits from which a document is taken to depend on the one before it."""

_LENGTH = 7  # of each document; longer than the window of the small copy


def leaks(case: Case) -> list[Trap]:
    """Rows that SFT packs without a boundary that every layer respects.

    Raises:
        CannotCheckError: if a small copy of the model cannot be run.
    """
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
            return [Trap(what.rstrip("."), f"`{key}: false`, or install what is missing")]
        raise CannotCheckError(f"a small copy of the model could not be run{layers}: {first_line(error)}") from error
    if change < LEAST_CHANGE:
        return []
    other = "" if stateful else ', or `attn_implementation: "flash_attention_2"`'
    return [
        Trap(
            f"`{key}: true`, but a document changes what {case.config.model_type} computes for the next one in its row"
            f"{layers}: logits of a small copy move by {change:.1g} of the largest, while the loss looks healthy",
            f"`{key}: false`{other}",
        )
    ]


def _stateful(config: PreTrainedConfig) -> list[str]:
    """The types of layers that are no attention, but may carry a state from one document to the next."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kind for kind in kinds if not kind.endswith("attention") or kind.startswith("linear"))


def _change_of_small_copy(case: Case) -> float:
    """[`_change`] of a copy of the model with small sizes and random weights, on a GPU if there is one."""
    config = small_config(copy.deepcopy(case.config))
    asked = case.values["attn_implementation"]
    named = None if asked in (None, "auto") or str(asked).startswith("flash") else asked
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        model = model_class(config).from_config(config, attn_implementation=named).float().eval()
        if named is None and case.values["use_liger_kernel"]:
            apply_liger_kernel(model, kernels_of(case.values, case.source))
        return _change(model)


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
