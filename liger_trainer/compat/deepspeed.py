"""Private names of DeepSpeed, which is optional: they are checked where it is in use."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

PARTITIONED_PARAMETERS = Feature(
    "looking at the parameters that ZeRO-3 has partitioned",
    Private("deepspeed.runtime.zero.partition_parameters:Init._partition_param", uses="ds_tensor, ds_numel"),
)

EXCHANGED_HEADS = Feature(
    "our attention under sequence parallelism",
    Private(
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.register_with_transformers",
        uses="core_attn_implementation, _attn_implementation, ALL_ATTENTION_FUNCTIONS",
    ),
    Private("deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPDataLoaderAdapter.refill", uses="shift_labels"),
    Private("deepspeed.utils.groups:_get_sequence_parallel_group"),
)

ADDED_PARTS = Feature(
    "the gradient under sequence parallelism",
    Private("deepspeed.runtime.engine:DeepSpeedEngine._reduce_non_expert_gradients", uses="sequence_parallel_size"),
    Private(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
        uses="sequence_parallel_size",
    ),
    Private(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        uses="reduce_scatter_coalesced",
    ),
)

PARTITIONED_HEAD = Feature(
    "reading an LM head that ZeRO-3 has partitioned",
    Private(
        "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
        uses="ds_id, ds_status, ds_shape, AVAILABLE",
    ),
    Private(
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module",
        uses="pre_bwd_fn, PreBackwardFunctionForModule",
    ),
)
