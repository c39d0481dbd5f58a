"""What a trainer refuses of its launch and of a tied head, or warns of, when it is built."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.head.lm_head import adapts_tied_weight
from liger_trainer.stock_trainer import data_parallel_message

logger = logging.getLogger("liger_trainer")


def check_launch(trainer: Any, takes_parts_of_sequences: bool) -> None:
    """Checks, after the construction of the Hugging Face trainer, that the launch suits it.

    Raises:
        ValueError: for several GPUs in one process, for context or sequence parallelism where the loss needs whole
            sequences, and for a model that `from_pretrained` has split and the launch would split again.
    """
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise ValueError(data_parallel_message(name))
    for option, size in (("cp_size", trainer.get_cp_size()), ("sp_size", trainer.get_sp_size())):
        if size > 1 and not takes_parts_of_sequences:
            raise ValueError(
                f"`parallelism_config` has `{option}={size}`, which gives every process a part of each sequence; the "
                f"loss of {name} needs whole ones. Set `{option}=1` and split the model with FSDP2 or tensor "
                "parallelism, or train with LigerTrainer or LigerSFTTrainer."
            )
    if trainer.is_distributed_loading_by_transformers and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        again = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise ValueError(
            "`model` was split by `from_pretrained` (`distributed_config`), and the launch would split it again with "
            f"{again}. Launch it with `torchrun`, or `accelerate launch` with `--accelerate_config ddp`; "
            "`DistributedConfig(fsdp_size=...)` is FSDP2."
        )


def warn_of_fp32_weights(trainer: Any) -> None:
    """Warns if accelerate's FSDP is going to make the bf16 weights fp32 that `liger_adamw` was to train."""
    precision = trainer.accelerator.mixed_precision
    if trainer.args.optim != LIGER_ADAMW or not trainer.is_fsdp_enabled or precision == "no":
        return
    if trainer.is_world_process_zero() and any(
        weight.requires_grad and weight.dtype == torch.bfloat16 for weight in trainer.model.parameters()
    ):
        logger.warning(
            "Mixed precision is on (%s), so FSDP trains fp32 weights, 16 bytes a parameter, as with `optim: "
            "adamw_torch_fused`. For `liger_adamw` to train bf16 weights, 8 bytes a parameter, set `bf16: false`; in a "
            "script of your own, also launch it with `accelerate launch --mixed_precision no`.",
            precision,
        )


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
