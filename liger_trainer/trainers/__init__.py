"""The trainers of transformers and TRL with the kernels.

- `base`: what every trainer adds; `trl_mixin` what those over TRL add, and `pair_mixin`, `generation_mixin` and
  `teacher` what several of them share; `*_trainer` has a class each
- `step`: what is known of a batch before its loss
- `fused_head`, `fused_forward`: TRL's forward of token statistics, with our head
- `choose_packing`, `packed_scores`, `tried_adapters`, `grouping`: rows without padding
- `reference`, `same_rows`: that the reference is the policy when training starts
- `evaluating`, `label_smoothing`, `adapter_methods`, `exact_sync`, `activation_memory`, `offloading`, `fp8_base` and
  `moe`: one feature each
- `checks`: what is refused before a run, and what a failure says
- `checkpoints`: saving and resuming
"""
