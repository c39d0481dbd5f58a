"""Private names of PEFT."""

from __future__ import annotations

from typing import Any

from liger_trainer.compat.private import Feature, Private, mentions

_REFUSED_MERGES = (
    Private("peft.tuners.tuners_utils:BaseTuner._check_merge_allowed", "self"),
    Private("peft.tuners.tuners_utils:BaseTuner.merge_adapter", uses="_check_merge_allowed"),
    Private("peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge", uses="_check_merge_allowed"),
)

ADAPTERS_ON_FOUR_BITS = Feature(
    "adapters on experts in 4 bits",
    Private("peft.tuners.tuners_utils:BaseTuner"),
    Private("peft.tuners.lora.layer:ParamWrapper"),
    Private("peft.tuners.lora.layer:ParamWrapper._activate_lora", "self, active_adapters"),
    Private("peft.tuners.lora.layer:ParamWrapper.forward", uses="_activate_lora"),
    Private("peft.tuners.lora.layer:ParamWrapper.__init__", uses="parameter_name"),
    *_REFUSED_MERGES,
)

ADAPTERS_ON_FP8 = Feature(
    "refusing to merge adapters into a base in fp8", Private("peft.tuners.tuners_utils:BaseTuner"), *_REFUSED_MERGES
)

MERGED_ADAPTERS = Feature(
    "merging adapters for vLLM without a change of their base",
    Private("peft.tuners.tuners_utils:BaseTunerLayer"),
    Private("peft.tuners.tuners_utils:BaseTunerLayer.merged_adapters"),
    Private("peft.tuners.tuners_utils:BaseTuner._check_merge_allowed", "self"),
    Private("peft.tuners.tuners_utils:BaseTuner.merge_adapter", uses="_check_merge_allowed, merge"),
    needed=False,
)

ADAPTERS_ON_HEAD = Feature("adapters on the LM head of a student", Private("peft.tuners.tuners_utils:BaseTunerLayer"))

TIED_ADAPTERS = Feature(
    "noticing adapters on an LM head that is tied to the embedding",
    Private("peft.tuners.tuners_utils:BaseTunerLayer"),
    needed=False,
)

TUNER_LAYERS = Feature(
    "checks of adapters on weights in 8 bits and fewer",
    Private("peft.tuners.tuners_utils:BaseTunerLayer"),
    Private("peft.tuners.lora.layer:LoraLayer.reset_lora_parameters", "self, adapter_name, init_lora_weights"),
    Private("peft.tuners.lora.layer:ParamWrapper.__init__", uses="parameter_name"),
    needed=False,
)

TRIED_ADAPTERS = Feature(
    "trying whether adapters mix tokens or draw random numbers",
    Private("peft.tuners.tuners_utils:BaseTunerLayer"),
    Private("peft.tuners.tuners_utils:BaseTunerLayer.get_base_layer", "self"),
    Private("peft.tuners.tuners_utils:BaseTunerLayer.active_adapters"),
)

HEAD_COPIES = Feature(
    "training the LM head beside adapters (`modules_to_save`)",
    Private("peft.utils.other:ModulesToSaveWrapper.update", uses="original_module, modules_to_save"),
)

LORA_LAYERS = Feature(
    "LoRA layers as one operator",
    Private(
        "peft.tuners.lora.layer:Linear.forward",
        "self, x, ...",
        uses="disable_adapters, merged, active_adapters, base_layer, lora_A, lora_B, lora_dropout, scaling, "
        "lora_variant",
    ),
    Private("peft.tuners.lora.layer:LoraLayer.__init__", uses="cast_input_dtype_enabled, lora_variant"),
    Private("peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters"),
    Private("peft.tuners.tuners_utils:BaseTunerLayer._active_adapter"),
    Private("peft.tuners.tuners_utils:BaseTunerLayer.merged_adapters"),
    needed=False,
)

LORA_EXPERTS = Feature(
    "adapters on experts in the operator of the experts",
    Private("peft.tuners.lora.layer:ParamWrapper.get_delta_weight", "self, adapter_name, ..."),
    Private("peft.tuners.lora.layer:ParamWrapper.__init__", uses="parameter_name, _did_swap_in_out_features"),
    needed=False,
)

STACKED_ADAPTERS = Feature(
    "taking adapters on stacked experts apart",
    Private(
        "peft.tuners.lora.layer:ParamWrapper.get_delta_weight",
        "self, adapter_name, ...",
        uses="num_experts, _did_swap_in_out_features",
    ),
    Private("peft.tuners.lora.layer:ParamWrapper.__init__", uses="parameter_name"),
)

RANK_ALLOCATION = Feature(
    "resuming AdaLoRA with the importance of its ranks",
    Private("peft.tuners.adalora.layer:RankAllocator.update_ipt", uses="ipt, exp_avg_ipt, exp_avg_unc"),
    Private(
        "peft.tuners.adalora.model:AdaLoraModel.update_and_allocate",
        "self, global_step",
        uses="rankallocator, rank_pattern, trainable_adapter_name",
    ),
    needed=False,
)

ADDED_TERMS = Feature(
    "the term that AdaLoRA adds to the loss",
    Private("peft:AdaLoraModel.forward", uses="loss, trainable_adapter_name"),
    Private("peft:PeftModelForCausalLM.forward", uses="base_model"),
)
"""What [`adds_to_loss`] and [`calls_tuner`] look for; without it the term would be missing, without a word."""


TUNERS = Feature("telling tuners of PEFT from prompt learning", Private("peft.tuners.tuners_utils:BaseTuner"))


def adds_to_loss(tuner: Any) -> bool:
    """Whether the forward of a tuner, PEFT's module around a model, does something with the loss of the outputs."""
    return mentions(type(tuner).forward, "loss")


def adds_loss_of_labels(tuner: Any) -> bool:
    """Whether what the forward of a tuner that [`adds_to_loss`] adds is a loss of the labels, as in Shadow."""
    return mentions(type(tuner).forward, "labels")


def calls_tuner(model: Any) -> bool:
    """Whether the forward of a PEFT model runs that of its tuner, and not the one of the model inside."""
    return mentions(type(model).forward, "base_model")
