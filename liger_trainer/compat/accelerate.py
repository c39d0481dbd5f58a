"""Private names of accelerate."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

WRAPPED_OPTIMIZER = Feature(
    "reading the optimizer that accelerate has wrapped",
    Private("accelerate.optimizer:AcceleratedOptimizer.__init__", uses="optimizer, scaler"),
)

FSDP_PLUGIN = Feature(
    "refusing adapters that FSDP would not save or load",
    Private("accelerate.state:AcceleratorState.__init__", uses="fsdp_plugin"),
)

SPLIT_LAYERS = Feature(
    "splitting each layer of a reference or a teacher by itself under FSDP2",
    Private("accelerate.utils.fsdp_utils:fsdp2_prepare_auto_wrap_policy", "fsdp2_plugin, model"),
    Private("accelerate.utils.fsdp_utils:get_parameters_from_modules", "modules, model, device"),
    needed=False,
)

AUTOCAST_FORWARD = Feature(
    "continuous batching with mixed precision, without the forward that returns fp32",
    Private("accelerate:Accelerator.prepare_model", uses="_original_forward, convert_outputs_to_fp32"),
)

CONTEXT_PARALLEL = Feature(
    "our attention under context parallelism",
    Private("accelerate:Accelerator._prepare_cp", "self, args", uses="_attach_context_parallel_hooks, _cp_context"),
    Private("accelerate:Accelerator.prepare", uses="_prepare_cp, cp_enabled"),
)

SEQUENCE_PARALLEL = Feature(
    "our attention under sequence parallelism",
    Private("accelerate:Accelerator._prepare_deepspeed", uses="register_with_transformers, sp_attn_implementation"),
    Private("accelerate:Accelerator.prepare_data_loader", uses="_prepare_device_mesh"),
    Private("accelerate.data_loader:prepare_data_loader", uses="DEEPSPEED, submesh_tp_size"),
)

OFFLOADED_WEIGHTS = Feature(
    "layers with a short convolution whose weights are offloaded",
    Private("accelerate.hooks:add_hook_to_module", uses="_hf_hook"),
    needed=False,
)
