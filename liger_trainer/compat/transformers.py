"""Private names of transformers."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

_TRAINER = "transformers.trainer:Trainer"

STOCK_TRAINER = Feature(
    "its kernels in the stock Trainer with `use_liger_kernel=True`",
    Private("transformers.integrations.liger:apply_liger_kernel", "model, kernel_config"),
    Private(f"{_TRAINER}.train", uses="apply_liger_kernel, liger_kernel_config"),
    needed=False,
)

_MODEL = "transformers.modeling_utils:PreTrainedModel"

USE_KERNELS = Feature(
    "its kernels in models with `use_kernels=True`",
    Private(f"{_MODEL}.set_use_kernels", "self, use_kernels, kernel_config, ...", uses="_use_kernels"),
    Private(f"{_MODEL}.from_pretrained", uses="use_kernels, set_use_kernels"),
    Private(f"{_MODEL}.train", uses="use_kernels, set_use_kernels"),
    needed=False,
)

WHOLE_CHECKPOINTS = Feature(
    "checkpoints that appear under their name only when they are complete",
    Private(
        "transformers.trainer_utils:rotate_checkpoints",
        "output_dir, save_total_limit, best_model_checkpoint, use_mtime, ...",
    ),
    Private(f"{_TRAINER}._save_checkpoint", "self, model, trial", uses="_get_output_dir"),
    Private(f"{_TRAINER}._get_output_dir", "self, trial"),
    Private(f"{_TRAINER}._push_from_checkpoint", "self, checkpoint_folder"),
)

RESUMING = Feature(
    "checks of a checkpoint before a run resumes from it",
    Private(f"{_TRAINER}._get_output_dir", "self, trial"),
    Private(f"{_TRAINER}._load_from_checkpoint", "self, resume_from_checkpoint, model"),
    Private(f"{_TRAINER}._load_optimizer_and_scheduler", "self, checkpoint"),
    Private(f"{_TRAINER}.train", "self, resume_from_checkpoint, trial, ..."),
    Private("transformers:TrainerState.compute_steps", "self, args, max_steps"),
)

RUN_STATE = Feature(
    "a resumed run with the numbers of one that was not interrupted",
    Private(f"{_TRAINER}._init_training_state", "self, max_steps, num_update_steps_per_epoch, ..."),
    Private(
        f"{_TRAINER}._run_epoch",
        "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch",
        uses="_tr_loss, get_batch_samples, _load_rng_state",
    ),
    Private(f"{_TRAINER}._maybe_log_save_evaluate", uses="_total_loss_scalar, _globalstep_last_logged"),
    Private(f"{_TRAINER}._save_rng_state", "self, output_dir"),
    Private(f"{_TRAINER}._load_rng_state", "self, checkpoint"),
    Private(f"{_TRAINER}._get_dataloader", "self, dataset, ...", uses="data_collator"),
)

CONVERTED_CHECKPOINTS = Feature(
    "resuming mixtures of experts, AdaLoRA, and models that `from_pretrained` has split, and loading the best adapters",
    Private(f"{_TRAINER}._load_from_checkpoint", "self, resume_from_checkpoint, model"),
    Private(f"{_TRAINER}._load_best_model", "self"),
    Private(f"{_TRAINER}._save_optimizer_and_scheduler", "self, output_dir"),
    Private(f"{_TRAINER}._load_optimizer_and_scheduler", "self, checkpoint"),
    Private(f"{_TRAINER}.__init__", uses="is_distributed_loading_by_transformers"),
)

DEQUANTISED_MODELS = Feature(
    "saving a model that was published quantised, after it was dequantised",
    Private(
        "transformers.core_model_loading:revert_weight_conversion", "model, state_dict", uses="_weight_conversions"
    ),
)

PUBLISHED_NAMES = Feature(
    "naming the linear layers of single experts",
    Private("transformers.core_model_loading:revert_weight_conversion", "model, state_dict"),
)

LOADED_WEIGHTS = Feature(
    "naming weights that no checkpoint held",
    Private("transformers:PreTrainedConfig.from_pretrained", uses="get_config_dict"),
    Private("transformers:AutoConfig.from_pretrained", uses="get_config_dict"),
    Private("transformers:PreTrainedModel._initialize_missing_keys", "self, is_quantized", uses="_is_hf_initialized"),
    needed=False,
)

SPLIT_OPTIMIZER = Feature(
    "checkpoints of the optimizer of a model that `from_pretrained` has split",
    Private("transformers.distributed:save_optimizer_distributed", "model, optimizer, checkpoint_dir"),
    Private("transformers.distributed:load_optimizer_distributed", "model, optimizer, checkpoint_dir"),
)

NON_FINITE_GUARD = Feature(
    "finding numbers that are not finite before gradients are clipped and weights are saved",
    Private(f"{_TRAINER}._clip_grad_norm", "self, model"),
    Private(f"{_TRAINER}.save_model", "self, output_dir, _internal_call"),
)

GRADIENT_NORM = Feature(
    "removing gradients without a walk over all modules",
    Private(f"{_TRAINER}._get_grad_norm", "self, model, grad_norm"),
    Private(f"{_TRAINER}._run_epoch", uses="_get_grad_norm, zero_grad"),
    needed=False,
)

SEQUENCE_PARALLEL_LOADER = Feature(
    "batches that a forward cuts under sequence parallelism",
    Private(f"{_TRAINER}._prepare_for_training", uses="deepspeed_ulysses_dl_adapter"),
)

CONTEXT_PARALLEL_INPUTS = Feature(
    "our attention under context parallelism",
    Private(f"{_TRAINER}._prepare_context_parallel_inputs", "self, model, inputs", uses="maybe_context_parallel"),
    Private(f"{_TRAINER}.training_step", uses="_prepare_context_parallel_inputs"),
    Private(f"{_TRAINER}.prediction_step", uses="_prepare_context_parallel_inputs"),
)

LOSS_SCALE = Feature(
    "dividing auxiliary losses as the Trainer divides its own",
    Private(
        f"{_TRAINER}.training_step",
        uses="loss_is_scaled_for_ga, model_accepts_loss_kwargs, compute_loss_func, current_gradient_accumulation_steps",
    ),
    Private(f"{_TRAINER}.compute_loss", uses="average_tokens_across_devices, num_processes, get_tp_size"),
)

LABELS_OF_A_STEP = Feature(
    "counting labels after a trainer has replaced them",
    Private(f"{_TRAINER}._get_num_items_in_batch", "self, batch_samples, device"),
)

LABEL_SMOOTHING = Feature(
    "label smoothing without building the logits",
    Private("transformers.trainer_pt_utils:LabelSmoother", "epsilon, ignore_index"),
    Private(
        "transformers.trainer_pt_utils:LabelSmoother.__call__",
        "self, model_output, labels, shift_labels, num_items_in_batch",
    ),
    Private(f"{_TRAINER}.compute_loss", uses="label_smoother"),
)

META_WEIGHTS = Feature(
    "an error that names parameters without data (on the meta device)",
    Private(f"{_TRAINER}._move_model_to_device", "self, model, ..."),
    needed=False,
)

BATCH_CHECKS = Feature(
    "checks of labels and token ids while a batch is on the CPU",
    Private(f"{_TRAINER}._get_dataloader", "self, dataset, ..."),
    needed=False,
)

PROMPT_TOKENS = Feature(
    "`tokens_per_second` of trainers that generate",
    Private(f"{_TRAINER}._prepare_inputs", "self, inputs, ..."),
    needed=False,
)

LOGGED_LOSS = Feature(
    "a logged loss that is finite again after a step whose loss was not",
    Private(f"{_TRAINER}._run_epoch", uses="_tr_loss"),
    needed=False,
)

GATED_EXPERTS = Feature(
    "recognising the experts of a mixture of experts by `_apply_gate`",
    Private("transformers.integrations.moe:use_experts_implementation", uses="_apply_gate"),
)

EXPERTS = Feature(
    "the experts of a mixture of experts as one operator",
    Private("transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS"),
    Private("transformers.integrations.moe:ExpertsInterface.get_interface", "self, experts_implementation, ..."),
    Private(
        "transformers.integrations.moe:use_experts_implementation",
        uses="_experts_implementation, has_gate, _apply_gate",
    ),
    needed=False,
)

DECORATOR_OF_EXPERTS = "transformers.integrations.moe"
"""The module whose `use_experts_implementation` gives a class of experts its forward."""

SHARED_EXPERTS = Feature(
    "leaving experts that processes share as they are",
    Private("transformers.integrations.moe:use_experts_implementation", uses="_is_expert_parallel"),
    needed=False,
    since="5.18",
)

EXPERT_EXCHANGE = Feature(
    "the exchange of tokens between processes that share experts",
    Private("transformers.distributed.expert_parallel:AutoEP"),
    Private("transformers.distributed.expert_parallel:AllToAllEP"),
    Private("transformers.distributed.expert_parallel:EPImplementationInterface"),
    Private("transformers.distributed.expert_parallel:MoEParamShard.shard_param", uses="_is_expert_parallel"),
    Private(
        "transformers.distributed.expert_parallel:EpDispatchExpertsParallel.install_forward",
        "self, module, ep_mesh, tp_mesh, ep_implementation",
        uses="implementation, context_around_forward",
    ),
    needed=False,
    since="5.23",
    canary="liger_trainer.tools.canaries:expert_exchange",
)

SPLIT_HEAD = Feature(
    "the loss of an LM head that tensor parallelism splits, without gathering its logits",
    Private(
        "transformers.distributed.tensor_parallel:TensorParallelLayer.install_forward",
        "self, module, mesh",
        uses="original_forward",
    ),
    Private(
        "transformers.distributed.tensor_parallel:ColwiseParallel.__init__",
        "self, input_layouts, output_layouts, use_local_output",
    ),
    needed=False,
    canary="liger_trainer.tools.canaries:split_head",
)

LOAD_BALANCING = Feature(
    "the load-balancing loss as one operator",
    Private(
        "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func",
        "gate_logits, num_experts, top_k, attention_mask",
    ),
    Private("transformers.models.mixtral.modeling_mixtral:MixtralForCausalLM.forward", uses="load_balancing_loss_func"),
    needed=False,
    canary="liger_trainer.tools.canaries:load_balancing_loss",
)

PLANNED_ATTENTION = Feature(
    "a plan for the attention that a model runs",
    Private("transformers:PreTrainedConfig._attn_implementation"),
    needed=False,
)

LEAST_PEFT = Feature(
    "naming the PEFT that `model.add_adapter` asks for",
    Private("transformers.integrations.peft:MIN_PEFT_VERSION"),
    needed=False,
)

LOSS_OPTIONS = Feature(
    "refusing options that a model's loss would ignore", Private("transformers.loss.loss_utils:LOSS_MAPPING")
)

GENERATION_STEPS = Feature(
    "running the steps of a generation as the model's classes are written",
    Private(
        "transformers.generation.utils:GenerationMixin.prepare_inputs_for_generation",
        "self, input_ids, next_sequence_length, ...",
    ),
    needed=False,
    canary="liger_trainer.tools.canaries:cache_of_a_step",
)

MASK_FUNCTIONS = Feature(
    "recognising windows, chunks and packed rows in the description of an attention mask",
    Private("transformers.masking_utils:and_masks", uses="mask_functions"),
    Private("transformers.masking_utils:sliding_window_overlay", "sliding_window", uses="sliding_window"),
    Private("transformers.masking_utils:chunked_overlay", "chunk_size, left_padding", uses="chunk_size"),
    Private(
        "transformers.masking_utils:packed_sequence_mask_function", "packed_sequence_mask", uses="packed_sequence_mask"
    ),
)

REMAPPED_POSITIONS = Feature(
    "recognising windows and chunks inside of packed rows",
    Private(
        "transformers.masking_utils:remap_positions_for_packed_sequence",
        "mask_function, position_ids",
        uses="mask_function, position_ids",
    ),
    since="5.23",
)

RECOGNISED_MASKS = Feature(
    "packed rows, windows and chunks without a mask of all pairs of tokens",
    Private("transformers.masking_utils:create_causal_mask", "config, inputs_embeds, attention_mask, ..."),
    Private(
        "transformers.masking_utils:create_sliding_window_causal_mask", "config, inputs_embeds, attention_mask, ..."
    ),
    Private("transformers.masking_utils:create_chunked_causal_mask", "config, inputs_embeds, attention_mask, ..."),
    needed=False,
    canary="liger_trainer.tools.canaries:masks",
)

ROTARY_FUNCTION = Feature(
    "rotary embeddings as one kernel",
    Private("transformers.models.llama.modeling_llama:apply_rotary_pos_emb", "q, k, cos, sin, ..."),
    Private("transformers.models.llama.modeling_llama:LlamaAttention.forward", uses="apply_rotary_pos_emb"),
    needed=False,
    canary="liger_trainer.tools.canaries:rotary_function",
)

ATTENTION = Feature(
    "attention without masks",
    Private("transformers:PreTrainedConfig._attn_implementation"),
    Private("transformers:PreTrainedModel._supports_sdpa"),
    Private("transformers.masking_utils:sdpa_mask", "batch_size, q_length, kv_length, ..."),
    needed=False,
    canary="liger_trainer.tools.canaries:attention",
)

CUT_SHARED_LAYERS_METHOD = "_maybe_slice_kv_shared_inputs"
CUT_SHARED_LAYERS = Feature(
    "attention without masks in models whose last layers share keys and run on the last tokens alone",
    Private(
        f"transformers.models.gemma4.modeling_gemma4:Gemma4TextModel.{CUT_SHARED_LAYERS_METHOD}",
        "self, hidden_states, per_layer_inputs, position_embeddings, causal_mask_mapping, logits_to_keep, ...",
        uses="_attn_implementation",
    ),
    Private(
        "transformers.models.gemma4.modeling_gemma4:Gemma4TextModel.forward",
        uses=f"{CUT_SHARED_LAYERS_METHOD}, logits_to_keep",
    ),
    needed=False,
    since="5.23",
    canary="liger_trainer.tools.canaries:cut_shared_layers",
)

DEFAULT_ATTENTION = Feature(
    "the attention that transformers takes where ours is not proved",
    Private("transformers.modeling_utils:PreTrainedModel._supports_sdpa"),
)

PACKED_POSITIONS = Feature(
    "not reading back position ids that a model has made itself",
    Private("transformers.masking_utils:find_packed_sequence_indices", "position_ids"),
    Private("transformers.masking_utils:_preprocess_mask_arguments", uses="find_packed_sequence_indices"),
    needed=False,
)

_BATCHING = "transformers.generation.continuous_batching.continuous_api:ContinuousBatchingManager"
CONTINUOUS_BATCHING = Feature(
    "continuous batching (`generate_batch`) of a model with our attention",
    Private(_BATCHING),
    Private(f"{_BATCHING}.__init__", uses="switch_to_cb_friendly_attn"),
    Private(f"{_BATCHING}.switch_to_cb_friendly_attn", "self, model, ...", uses="_attn_implementation"),
    Private(f"{_BATCHING}.start", "self, ...", uses="_generation_thread"),
    Private(f"{_BATCHING}.stop", "self, ...", uses="_generation_thread"),
    needed=False,
)

CHECKPOINTED_LAYERS = Feature(
    "keeping activations by `activation_memory`",
    Private("transformers.modeling_layers:GradientCheckpointingLayer.gradient_checkpointing"),
    Private("transformers:PreTrainedModel._set_gradient_checkpointing", uses="_gradient_checkpointing_func"),
    canary="liger_trainer.tools.canaries:checkpointed_layer",
)

CONVOLUTIONS = Feature(
    "layers that mix tokens by a recurrence or a short convolution",
    Private(
        "transformers.integrations.hub_kernels:use_kernel_func_from_hub_with_fallback",
        "func_name, package, ...",
        uses="torch_function",
    ),
    Private("transformers.models.lfm2.modeling_lfm2:Lfm2ShortConv.forward", uses="causal_conv1d_fn"),
    needed=False,
    canary="liger_trainer.tools.canaries:torch_convolution",
)

STACKED_EXPERTS = Feature(
    "the experts of a mixture of experts as one operator",
    Private("transformers.models.mixtral.modeling_mixtral:MixtralExperts.forward", "self, hidden_states, ..."),
    needed=False,
    canary="liger_trainer.tools.canaries:experts",
)

PACKED_CHECKPOINTS = Feature(
    "loading checkpoints whose weights stay packed",
    Private(
        "transformers.core_model_loading:rename_source_key",
        "source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict, ...",
    ),
    Private("transformers.conversion_mapping:get_model_conversion_mapping", "model, key_mapping, hf_quantizer, ..."),
    Private("transformers.core_model_loading:WeightConverter"),
    Private("transformers.core_model_loading:WeightRenaming"),
    Private("transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING"),
    Private("transformers.quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING"),
    Private("transformers.quantizers:HfQuantizer.preprocess_model", uses="_process_model_before_weight_loading"),
    Private("transformers.quantizers:HfQuantizer.postprocess_model", uses="_process_model_after_weight_loading"),
    Private(
        "transformers.quantizers:HfQuantizer.update_weight_conversions",
        uses="_original_source_patterns, _original_target_patterns",
    ),
    Private("transformers:PreTrainedModel.from_pretrained", uses="checkpoint_files"),
    Private("transformers:PreTrainedModel._initialize_missing_keys", uses="_is_hf_initialized"),
    Private("transformers:PreTrainedModel._keys_to_ignore_on_load_missing"),
    Private("transformers.quantizers:HfQuantizer.remove_quantization_config", "self, model"),
    Private("transformers.core_model_loading:WeightConverter.copy", "self, source_patterns, target_patterns, ..."),
    Private("transformers.core_model_loading:Concatenate"),
)
