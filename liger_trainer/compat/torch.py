"""Private names of torch."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

SKIPPED_ON_DEVICE = Feature(
    "leaving out an update that is not finite without waiting for the device",
    (
        Private("torch.optim.adam:Adam.__init__", uses=("_step_supports_amp_scaling",)),
        Private("torch.optim.adam:Adam.step", uses=("grad_scale", "found_inf")),
    ),
    needed=False,
)

NORMS_OF_MANY = Feature("finding numbers that are not finite", (Private("torch:_foreach_norm"),))

ROUTER_BALANCE = Feature(
    "counting the tokens of each expert once under gradient checkpointing",
    (Private("torch._C:_current_graph_task_id"),),
)

PARTIAL_OFFLOADING = Feature(
    "offloading a fraction of the activations",
    (Private("torch:Tensor._base"), Private("torch.utils.weak:WeakTensorKeyDictionary")),
)

ONE_PASS = Feature("noticing logits that were changed in place", (Private("torch:Tensor._version"),))

SAVED_IN_FOUR_BITS = Feature(
    "saving experts in 4 bits for the backward",
    (Private("torch._C._autograd:_top_saved_tensors_default_hooks"),),
    needed=False,
)

FOUR_BIT_EXPERTS = Feature(
    "experts in 4 bits",
    (
        Private("torch.nn:Module._apply", ("self", "fn", "recurse")),
        Private("torch.nn:Module.__init__", uses=("_parameters", "_modules")),
    ),
)
