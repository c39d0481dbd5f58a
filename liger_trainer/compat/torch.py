"""Private names of torch."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

SAVED_AS_IS = Feature(
    "saving tensors past the hooks of activation offloading",
    Private("torch._C._autograd:_saved_tensors_hooks_is_enabled"),
)

RELEASED_GRAPHS = Feature(
    "writing gradients over saved tensors that no later backward needs",
    Private("torch._C._autograd:_get_current_graph_task_keep_graph"),
    needed=False,
)

GRAPH_TASK = Feature(
    "decoding a packed weight once in a backward that recomputes its layer, rather than twice",
    Private("torch._C:_current_graph_task_id"),
    needed=False,
)

FLASH_OPERATOR = Feature(
    "attention with windows and documents by torch's flash operator, rather than our slower kernels",
    Private("torch.ops:aten._flash_attention_forward"),
    Private("torch.ops:aten._flash_attention_backward"),
    needed=False,
)

DEVICE_ASSERTIONS = Feature(
    "checking ids of experts and padding masks without waiting for the device", Private("torch:_assert_async")
)

SKIPPED_ON_DEVICE = Feature(
    "leaving out an update that is not finite without waiting for the device",
    Private("torch.optim.adam:Adam.__init__", uses="_step_supports_amp_scaling"),
    Private("torch.optim.adam:Adam.step", uses="grad_scale, found_inf"),
    needed=False,
)

ARITHMETIC_OF_MANY = Feature(
    "counting the steps of all parameters at once", Private("torch:_foreach_add_"), Private("torch:_foreach_sub_")
)

PLACE_OF_A_SHARD = Feature(
    "rounding that does not depend on how a parameter is sharded",
    Private(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "global_shape, mesh, placements, ..."
    ),
)

PARTS_OF_FSDP1 = Feature(
    "refusing states that FSDP1 cannot save",
    Private("torch.distributed.fsdp._common_utils:_is_fsdp_flattened", "tensor"),
)

COMPILED_NAMES = Feature(
    "compiling a model whose config has the name of our attention",
    Private("torch.utils._pytree:register_constant", "cls"),
    needed=False,
)

NORMS_OF_MANY = Feature("finding numbers that are not finite", Private("torch:_foreach_norm"))

ROUTER_BALANCE = Feature(
    "counting the tokens of each expert once under gradient checkpointing", Private("torch._C:_current_graph_task_id")
)

PARTIAL_OFFLOADING = Feature(
    "offloading a fraction of the activations",
    Private("torch:Tensor._base"),
    Private("torch.utils.weak:WeakTensorKeyDictionary"),
)

CHANGED_IN_PLACE = Feature("noticing tensors that were changed in place", Private("torch:Tensor._version"))

SAVED_IN_FOUR_BITS = Feature(
    "saving experts in 4 bits for the backward",
    Private("torch._C._autograd:_top_saved_tensors_default_hooks"),
    needed=False,
)

FOUR_BIT_EXPERTS = Feature("experts in 4 bits", Private("torch.nn:Module._apply", "self, fn, recurse"))

FP8_LAYERS = Feature("bases of LoRA layers in fp8", Private("torch.nn:Module._apply", "self, fn, recurse"))

FOUR_BIT_WEIGHTS = Feature("reading the memory of weights in 4 bits", Private("torch._C:DisableTorchFunctionSubclass"))

DEFERRED_LOGITS = Feature(
    "logits that are not built",
    Private("torch:Tensor._make_wrapper_subclass"),
    Private("torch:Tensor._version"),
    Private("torch:Tensor._is_view"),
    Private("torch:UntypedStorage._cdata"),
    Private("torch._C:DisableTorchFunctionSubclass"),
    Private("torch._C._nn:_parse_to"),
    Private("torch._ops:OpOverload.__init__", uses="_schema"),
)

NESTED_VALUES = Feature(
    "tensors that are computed on their first use",
    Private("torch.utils._pytree:tree_map", "func, tree, ..."),
    Private("torch.utils._pytree:tree_leaves", "tree, ..."),
)

CALLS_OF_LAYERS = Feature(
    "layers that run from CUDA graphs",
    Private("torch.utils._pytree:tree_flatten", "tree, is_leaf"),
    Private("torch.utils._pytree:tree_unflatten", "leaves, treespec"),
    Private("torch._C:_len_torch_dispatch_stack"),
    Private("torch.overrides:_get_current_function_mode_stack", ""),
    Private("torch._C._autograd:_top_saved_tensors_default_hooks"),
)

FAILED_CAPTURES = Feature("going on where a CUDA graph cannot be captured", Private("torch._C:_cuda_endAllocateToPool"))

COPIES_OF_MANY = Feature("writing all gradients of a layer at once", Private("torch:_foreach_copy_"))

COMPILED_HEAD = Feature(
    "training compiled models without building their logits",
    Private("torch._dynamo.eval_frame:set_eval_frame"),
    Private("torch._dynamo.eval_frame:skip_code"),
    needed=False,
)

WHOLE_GRAPHS = Feature(
    "training compiled models without building their logits",
    Private("torch._dynamo.symbolic_convert:InstructionTranslator.current_tx", ""),
    Private(
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.__init__", uses="one_graph, error_on_graph_break"
    ),
    needed=False,
)

OPERATOR_CALLS = Feature(
    "keeping activations by `activation_memory`",
    Private("torch.utils._python_dispatch:TorchDispatchMode"),
    Private("torch.utils._pytree:tree_leaves", "tree, ..."),
    Private("torch._ops:OpOverload.__init__", uses="_schema"),
)

CHECKPOINT_WRAPPERS = Feature(
    "keeping activations of layers that FSDP checkpoints",
    Private(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper.forward",
        uses="checkpoint_fn, _checkpoint_wrapped_module",
    ),
)

MODULE_CONTENTS = Feature(
    "reading the parameters, buffers and children of a module",
    Private("torch.nn:Module.__init__", uses="_parameters, _buffers, _modules"),
)

REPLICAS = Feature(
    "replicas of nn.DataParallel that compute with their own weights",
    Private("torch.nn:Module._replicate_for_data_parallel", "self"),
    Private("torch.nn.parallel.replicate:replicate", uses="_replicate_for_data_parallel"),
)

FUNCTION_TRANSFORMS = Feature(
    "running modules inside the transforms of torch.func as they are",
    Private("torch._C:_are_functorch_transforms_active"),
)

MODULE_HOOKS = Feature(
    "running modules with hooks as they are",
    Private("torch.nn.modules.module:_has_any_global_hook", ""),
    Private("torch.nn.modules.module:_global_backward_hooks"),
    Private("torch.nn.modules.module:_global_backward_pre_hooks"),
    Private(
        "torch.nn:Module._call_impl", uses="_forward_hooks, _forward_pre_hooks, _backward_hooks, _backward_pre_hooks"
    ),
    Private(
        "torch.nn:Module.__init__",
        uses="_forward_hooks_with_kwargs, _forward_hooks_always_called, _forward_pre_hooks_with_kwargs",
    ),
    Private("torch.nn:Module.compile", uses="_compiled_call_impl"),
)

FSDP_HEAD = Feature(
    "reading the LM head of a model that FSDP shards",
    Private("torch.distributed.fsdp:fully_shard", uses="_is_fsdp_managed_module"),
    Private("torch.distributed.fsdp._dynamo_utils:_annotate_modules_for_dynamo", uses="_is_fsdp_managed_module"),
)

FSDP1_UNITS = Feature(
    "refusing adapters that FSDP1 would not save", Private("torch.distributed.fsdp._common_utils:FSDP_WRAPPED_MODULE")
)

FSDP2_ROOT = Feature(
    "a reference that runs, without the adapters, before anything else does under FSDP2",
    Private("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "self"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init", "self", uses="_is_root, lazy_init"),
    needed=False,
)

BUSY_DEVICE = Feature("benchmarks without the time of the host", Private("torch.cuda:_sleep", "cycles"), needed=False)

COLLECTIVES = Feature(
    "operators over several processes",
    *(
        Private(f"torch:ops._c10d_functional.{name}")
        for name in (
            "all_gather_into_tensor",
            "all_reduce",
            "all_to_all_single",
            "reduce_scatter_tensor",
            "wait_tensor",
        )
    ),
)

SHARED_MEMORY = Feature(
    "backwards that write over an activation", Private("torch:UntypedStorage._cdata"), Private("torch:Tensor._base")
)

PLACE_IN_A_TENSOR = Feature("rotating a part of latent attention's queries in one pass", Private("torch:Tensor._base"))

RESULTS_TO_WRITE_TO = Feature("results of operators that a model may change in place", Private("torch:Tensor._is_view"))

DISPATCH_MODES = Feature(
    "calling operators without torch's dispatch in eager mode", Private("torch._C:_len_torch_dispatch_stack")
)
