"""The ways to split a model that a recipe can be started with, and why it cannot be with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_trainer.attention.interface import NAME
from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.plan.cluster import Cluster
from liger_trainer.plan.settings import MOST_PARTS, Setting, splits
from liger_trainer.plan.work import Run
from liger_trainer.recipe.checks import split_obstacle
from liger_trainer.recipe.experts import can_split_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYOUTS = ("sharded", "expert parallel", "context parallel", "tensor parallel")


def obstacles(values: Mapping[str, Any], config: PreTrainedConfig, run: Run, packed: bool) -> dict[str, str]:
    """Of each of `LAYOUTS` that the recipe cannot be started with: why. A checkpoint may stay `packed`."""
    whole = _against_splitting(values)
    codes = "the checkpoint stays packed" if packed else ""
    found = {
        "sharded": whole,
        "expert parallel": _against_experts(values, config) or whole or codes,
        "context parallel": _against_parts(values, config, run) or whole,
        "tensor parallel": _against_matrices(values, config, run) or whole or codes,
    }
    return {layout: reason for layout, reason in found.items() if reason}


def _against_splitting(values: Mapping[str, Any]) -> str:
    """Why no weight can be split."""
    key = next((key for key in ("load_in_4bit", "load_in_8bit", "fp8_base", "save_on_each_node") if values[key]), "")
    return f"`{key}` is true" if key else ""


def _against_experts(values: Mapping[str, Any], config: PreTrainedConfig) -> str:
    if not can_split_experts(config):
        return "transformers has no plan to split experts of this model"
    return (split_obstacle(values) or "").partition(":")[0]


def _against_parts(values: Mapping[str, Any], config: PreTrainedConfig, run: Run) -> str:
    """What `check_launch` or accelerate refuses, or a mask that ring attention does not have where it runs."""
    ours = run.implementation == NAME
    if ours and values["trainer"] in ("grpo", "rloo"):
        return "generation is not planned with it"
    if values["trainer"] not in ("sft", "causal_lm", *(("dpo", "kto") if ours else ())):
        return f"the loss of `trainer: {values['trainer']}` needs whole sequences"
    if any(kind.mixer is not None for kind in run.shape.kinds):
        return "a layer's state goes on from part to part"
    if config.get_text_config() is not config:
        return "the model takes images"
    if ours:
        return "`precompute_ref_log_probs` is true" if values.get("precompute_ref_log_probs") else ""
    if run.shape.sliding_window is not None:
        return "accelerate refuses models with sliding windows"
    if values.get("packing") or values.get("padding_free"):
        return "ring attention does not tell packed documents apart"
    if values["attn_implementation"] not in (None, "auto", "sdpa"):
        return f"`attn_implementation` is {values['attn_implementation']}, ring attention is torch's SDPA"
    return ""


def _against_matrices(values: Mapping[str, Any], config: PreTrainedConfig, run: Run) -> str:
    """What transformers, PEFT or a trainer refuses; activations of adapters, experts and mixers have no formula."""
    if values["trainer"] not in ("sft", "causal_lm"):
        return "it is planned for `trainer: sft` and `causal_lm` alone"
    if values["use_peft"]:
        return "PEFT gives adapters on split projections the wrong width"
    if run.shape.experts or any(kind.mixer is not None for kind in run.shape.kinds):
        return "experts and recurrent layers are not planned with it"
    if config.get_text_config() is not config or not getattr(config, "base_model_tp_plan", None):
        return "transformers has no plan to split this model's matrices"
    if values["activation_memory"]:
        return "`activation_memory` is not planned with it"
    return ""


def layouts(
    run: Run, values: Mapping[str, Any], against: Mapping[str, str], shared_experts: int, packed: bool, cluster: Cluster
) -> list[Setting]:
    """The ways to split the model of a run over a cluster, except those that the obstacles are `against`."""
    quantised_experts = bool(values["load_in_4bit"] and run.parameters.groups["experts"].elements)
    parts = [size for size in _powers(MOST_PARTS) if run.work.length % (2 * size) == 0]
    widths = (run.shape.heads, run.shape.key_value * run.shape.heads // max(run.shape.query, 1), run.shape.intermediate)
    matrices = [size for size in _powers(cluster.gpus_per_host) if all(width % size == 0 for width in widths)]
    return splits(
        cluster.gpus,
        cluster.hosts,
        quantised="sharded" in against,
        zero2=not (quantised_experts or values["fp8_base"] or packed) and run.optim != LIGER_ADAMW,
        experts=shared_experts,
        parts=() if "context parallel" in against else parts,
        matrices=() if "tensor parallel" in against else matrices,
    )


def _powers(most: int) -> list[int]:
    """2, 4, 8 ... up to `most`."""
    return [1 << power for power in range(1, most.bit_length())]
