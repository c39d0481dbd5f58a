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

AUTOCAST_FORWARD = Feature(
    "continuous batching with mixed precision, without the forward that returns fp32",
    Private("accelerate:Accelerator.prepare_model", uses="_original_forward, convert_outputs_to_fp32"),
)

OFFLOADED_WEIGHTS = Feature(
    "layers with a short convolution whose weights are offloaded",
    Private("accelerate.hooks:add_hook_to_module", uses="_hf_hook"),
    needed=False,
)
