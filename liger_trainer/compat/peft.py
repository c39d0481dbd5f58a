"""Private names of PEFT."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

FOUR_BIT_EXPERTS = Feature(
    "adapters on experts in 4 bits",
    (
        Private("peft.tuners.lora.layer:ParamWrapper"),
        Private("peft.tuners.lora.layer:ParamWrapper._activate_lora", ("self", "active_adapters")),
        Private("peft.tuners.lora.layer:ParamWrapper.forward", uses=("_activate_lora",)),
        Private("peft.tuners.lora.layer:ParamWrapper.__init__", uses=("parameter_name",)),
        Private("peft.tuners.tuners_utils:BaseTuner._check_merge_allowed", ("self",)),
        Private("peft.tuners.tuners_utils:BaseTuner.merge_adapter", uses=("_check_merge_allowed",)),
        Private("peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge", uses=("_check_merge_allowed",)),
    ),
)

ADAPTERS_ON_HEAD = Feature(
    "adapters on the LM head of a student", (Private("peft.tuners.tuners_utils:BaseTunerLayer"),)
)
