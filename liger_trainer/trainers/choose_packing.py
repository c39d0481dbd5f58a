"""`padding_free`, `share_prompt` and `tokens_per_micro_batch` of a trainer: what they come to for its model.

A reward model has a forward of its own on packed rows: the score of each sequence, of the token that its class takes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from liger_trainer.callbacks.logged import is_distributed
from liger_trainer.configs.trl_configs import PackingFlags, SharingFlags
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.kernels.copied_rows import copied_rows
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.packing.packed_row import PackedRow, each_row
from liger_trainer.packing.packing import Packing, drops, drops_attention
from liger_trainer.packing.proof import prove_packing, prove_scores
from liger_trainer.patching.as_written import is_ours
from liger_trainer.patching.binding import bind_forward
from liger_trainer.patching.model_forward import forward_layers
from liger_trainer.patching.probe import Agreement
from liger_trainer.patching.recurrent.find import mixers_of, reason_against_float16
from liger_trainer.patching.report import KernelReportRow
from liger_trainer.trainers.tried_adapters import TriedAdapters, try_adapters


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


PADDING_FREE, SHARE_PROMPT = "padding_free", "share_prompt"
_FLOAT16 = ("fp16", "fp16_full_eval")

_ALIKE = "the same for all that share a prompt"


def choose_packing(
    args: Any, model: Any, may_share: bool, ranks: Ranks | None = None
) -> tuple[Packing | None, list[KernelReportRow]]:
    """How batches are packed for a trainer's model with the kernels applied, and what the report says about it.

    Args:
        args: The trainer's.
        model: The model.
        may_share: Whether the loss is of sequences that may begin alike.
        ranks: The processes that compute parts of the same batches; None if each has batches of its own.
    """
    base: Any = without_adapters(model)
    if _asked(args, PADDING_FREE, PackingFlags) is False:
        return None, []
    agreement = None
    split = "" if ranks is None else f"`{ranks.option}` is {ranks.ranks}, and every process has a part of each row"
    reason = split or _reason_against(args, model)
    target = type(base).__name__
    if not reason:
        agreement = prove_packed_scores(base) if base.get_output_embeddings() is None else prove_packing(base)
        reason = agreement.reason or (
            reason_against_float16(base) if any(getattr(args, name, False) for name in _FLOAT16) else ""
        )
    error = None if agreement is None else agreement.error
    adapters = TriedAdapters() if reason else try_adapters(model)
    reason = reason or adapters.mixing
    if reason:
        return None, [KernelReportRow(PADDING_FREE, target, 1, None, error, f"batches stay padded: {reason}")]
    most = getattr(args, "tokens_per_micro_batch", None)
    kernel = "one row without padding" if most is None else f"rows of up to {most} tokens without padding"
    rows = [KernelReportRow(PADDING_FREE, target, 1, kernel, error)]
    if not may_share or _asked(args, SHARE_PROMPT, SharingFlags) is False:
        return Packing(False, most), rows
    if drops(model):
        reason = f"not in training: dropout, such as `lora_dropout`, is on, and would be {_ALIKE}"
    elif adapters.drawing:
        when = "" if adapters.always else "not in training: "
        reason = f"{when}{adapters.drawing}, a layer of its adapters, draws random numbers, which would be {_ALIKE}"
    kernel = "common beginnings once" + (", at one level: some layers have a state" if mixers_of(base) else "")
    shared = KernelReportRow(SHARE_PROMPT, target, 1, kernel, error)
    rows.append(KernelReportRow(SHARE_PROMPT, target, 1, None, None, reason) if reason else shared)
    return Packing(not adapters.always, most, draws=bool(adapters.drawing)), rows


def packing_of_reference(
    model: nn.Module, packing: Packing | None, rows: Sequence[KernelReportRow]
) -> tuple[Packing | None, Sequence[KernelReportRow]]:
    """How batches are packed for a reference: as for the policy, so that the two differ by their weights alone."""
    if packing is None:
        return packing, rows
    agreement = prove_packing(model)
    why = agreement.reason or try_adapters(model).mixing
    if not why:
        return packing, rows
    target, reason = f"{type(model).__name__}, the reference", f"its batches stay padded: {why}"
    return None, [*rows, KernelReportRow(PADDING_FREE, target, 1, None, agreement.error, reason)]


def _asked(args: Any, name: str, flags: type) -> bool | None:
    """What the user wants; None for the default. TRL's own `padding_free` is off by default."""
    value = getattr(args, name, None)
    return value if isinstance(args, flags) or value else None


def _reason_against(args: Any, model: nn.Module) -> str:
    if getattr(args, "torch_compile", False):
        return "`torch_compile` is on"
    if getattr(args, "neftune_noise_alpha", None) is not None:
        return "`neftune_noise_alpha` is set, whose noise depends on the length of the longest row"
    if drops_attention(model):
        return "its attention has dropout, which takes a mask of all pairs of tokens"
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        return f"{type(config).__name__} puts virtual tokens before the prompt"
    if getattr(config, "alora_invocation_tokens", None) is not None:
        return "its adapter begins at a token that it looks for in the padded batch"
    hooks = [*without_adapters(model)._forward_pre_hooks.values()]
    if hooks:
        return f"a hook on the model, {getattr(hooks[0], '__name__', type(hooks[0]).__name__)}, sees the padded batch"
    return ""


def check_packing(args: Any, rows: Sequence[KernelReportRow], has_router_loss: bool) -> None:
    """Checks what is asked for against what the model can do.

    Raises:
        ValueError: for `tokens_per_micro_batch` without packed rows, with a router's loss, or with reentrant
            checkpoints on several processes; with `strict_kernels`, for a flag that is true and a model that is left
            alone.
    """
    left = {row.component: row.reason for row in rows if not row.applied}
    off = "the head is not ours (`use_liger_kernel` or `linear_cross_entropy` is false)"
    why = left.get(PADDING_FREE) or ("" if rows else off)
    tokens = getattr(args, "tokens_per_micro_batch", None)
    if tokens is not None and why:
        raise ValueError(f"`tokens_per_micro_batch` is {tokens}, but {why}. Set `per_device_train_batch_size` instead.")
    refused = reason_against_splitting(args, has_router_loss)
    if tokens is not None and refused:
        raise ValueError(f"`tokens_per_micro_batch` is {tokens}, but {refused}")
    if not getattr(args, "strict_kernels", False):
        return
    for name, reason in ((PADDING_FREE, why), (SHARE_PROMPT, why or left.get(SHARE_PROMPT))):
        if reason and isinstance(args, PackingFlags) and getattr(args, name, None):
            raise ValueError(f"`{name}` is true and `strict_kernels` is set, but {reason}. Leave one of the two out.")


def reason_against_splitting(args: Any, has_router_loss: bool) -> str | None:
    """Why a batch of these arguments cannot run as several forwards, and what to do; None if it can."""
    if has_router_loss or getattr(args, "router_z_loss_coef", 0.0) > 0:
        return (
            "the routers' loss of a whole batch is not the sum of its parts'. Set `router_aux_loss_coef` and "
            "`router_z_loss_coef` to 0, or `per_device_train_batch_size` instead."
        )
    # A reentrant checkpoint has a backward of its own in each forward, and DDP and ZeRO reduce a gradient once.
    reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if reentrant and (is_distributed() or args.deepspeed):
        return (
            "checkpoints are reentrant, with which processes cannot share the gradients of several forwards. Set "
            "`use_reentrant` of `gradient_checkpointing_kwargs` to false (TRL does not allow that for adapters with "
            "ZeRO-3), or `per_device_train_batch_size` instead."
        )
    return None
