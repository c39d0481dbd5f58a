"""The trainers of transformers and TRL with the kernels.

- `base`: what every trainer adds; `trl_mixin` what those over TRL add, with our head, and `teacher` what those with a
  teacher share; `*_trainer` has one class, `*_trainers` those of a kind
- `step`: what is known of a batch before its loss
- `fused_forward`: TRL's forward of token statistics, with our head
- `choose_packing`, `tried_adapters`, `grouping`: rows without padding
- `reference`, `same_rows`: that the reference is the policy when training starts
- `evaluating`, `label_smoothing`, `adapter_methods`, `exact_sync`, `activation_memory`, `samples` and `moe`: one
  feature each
- `checks`: what is refused before a run, and what a failure says
- `checkpoints`: saving and resuming
"""
