"""The forward of a reward model on packed rows: the score of each sequence, of the token that its own forward takes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from liger_trainer.kernels.copied_rows import copied_rows
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.packing.packed_row import PackedRow, each_row
from liger_trainer.packing.packing import Packing
from liger_trainer.packing.proof import prove_packing, prove_scores
from liger_trainer.patching.as_written import is_ours
from liger_trainer.patching.binding import bind_forward
from liger_trainer.patching.model_forward import forward_layers
from liger_trainer.patching.probe import Agreement


def prove_packed_scores(model: Any) -> Agreement:
    """Compares the scores of a small copy of `model` with those of packed rows; a reason where there can be none.

    Args:
        model: A transformers model without a head for tokens.
    """
    if not may_be_packed(model):
        return Agreement(float("inf"), reason="its forward is not that of its class")
    if not isinstance(getattr(model, "score", None), nn.Module) or not hasattr(model, model.base_model_prefix):
        return Agreement(float("inf"), reason="it has no `score` of the hidden states of a model inside it")

    def pack(copy: Any, share: bool | None) -> None:
        install_packed_scores(copy, None if share is None else Packing(share))

    agreement = prove_packing(getattr(model, model.base_model_prefix))
    return prove_scores(model, pack) if agreement.equal else agreement


def may_be_packed(model: nn.Module) -> bool:
    """Whether the forward of `model` is that of its class, or an earlier trainer's."""
    return "forward" not in vars(model) or any(is_ours(layer) for layer in forward_layers(model))


def install_packed_scores(model: Any, packing: Packing | None) -> None:
    """Gives `model` a forward that packs its batches; one that cannot be packed runs the forward of its class.

    Args:
        model: For which [`may_be_packed`] holds, and with `packing` [`prove_packed_scores`].
        packing: How batches are packed; None leaves them padded, also where an earlier trainer packed them.
    """
    vars(model).pop("forward", None)  # accelerate may have wrapped it
    if packing is None:
        return
    native = type(model).forward

    @functools.wraps(native)
    def forward(self: Any, *args: Any, margin: torch.Tensor | None = None, **kwargs: Any) -> Any:
        rows = None
        if not args and not torch.compiler.is_compiling() and kwargs.get("input_ids") is not None:
            # TRL passes the margin of its loss on to the model, which ignores it.
            rows = packing.rows(self, kwargs, _scored_tokens(self, kwargs["input_ids"]), kwargs["input_ids"])
        sequences = 0 if rows is None else sum(len(row.scored.places) for row in rows)
        if rows is not None and sequences != len(kwargs["input_ids"]):
            packing.leave(self, "a sequence is scored by its padding")
            rows = None
        if rows is None:
            return native(self, *args, **kwargs)
        others = kwargs.keys() - rows[0].inputs.keys()
        # PEFT passes all arguments on, those of the score and its loss too.
        options = {name: kwargs[name] for name in others if kwargs[name] is not None}
        backbone = getattr(self, self.base_model_prefix)

        def of(row: PackedRow) -> torch.Tensor:
            with row.attended():
                hidden = backbone(**row.inputs, **options).last_hidden_state
            return copied_rows(self.score(copied_rows(hidden.flatten(0, 1), row.scored.tokens)), row.scored.copies)

        scores = each_row(of, rows, self)
        places = torch.cat([row.scored.places for row in rows]) // kwargs["input_ids"].shape[1]
        logits = torch.cat(scores).new_zeros(sequences, scores[0].shape[1]).index_copy(0, places, torch.cat(scores))
        return SequenceClassifierOutputWithPast(logits=logits)  # type: ignore[arg-type]

    bind_forward(model, forward, live=None)


def _scored_tokens(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Labels (B, S) with a 0 at the token whose score is its sequence's: the last one that is not the padding token."""
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = (columns * (input_ids != model.config.get_text_config().pad_token_id)).argmax(-1)
    return torch.full_like(input_ids, IGNORE_INDEX).scatter_(1, last[:, None], 0)
