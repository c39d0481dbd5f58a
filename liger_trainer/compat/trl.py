"""Private names of TRL, and those of its experimental trainers."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

FUSED_HEAD = Feature(
    "the fused LM head of the trainers over TRL",
    Private("trl.trainer.utils:add_fused_lm_head", "model, temperature, cast_lm_head_to_fp32, outputs"),
    Private(
        "trl.trainer.utils:FusedCausalLMOutput",
        "loss, log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1, label_mask, aux_loss",
    ),
)


def _head_of(name: str) -> Feature:
    """The two globals of a trainer's module that are ours while the trainer is built."""
    init = f"trl.trainer.{name.lower()}_trainer:{name}Trainer.__init__"
    return Feature(f"the fused LM head of Liger{name}Trainer", Private(init, uses="add_fused_lm_head, BaseTunerLayer"))


SFT_HEAD = _head_of("SFT")
DPO_HEAD = _head_of("DPO")
KTO_HEAD = _head_of("KTO")
GRPO_HEAD = _head_of("GRPO")
RLOO_HEAD = _head_of("RLOO")

TRAINER_NAME = Feature("the default `output_dir`", Private("trl.trainer.base_trainer:_BaseTrainer._name"))

SFT_ANSWERS = Feature(
    "the answers of `assistant_only_loss` in LigerSFTTrainer, for chat templates without markers",
    Private(
        "trl:SFTTrainer.__init__",
        uses="get_training_chat_template, is_chat_template_stop_token_trained, has_generation_markers",
    ),
    Private("trl:SFTTrainer._prepare_dataset", "self, dataset, processing_class, args, ...", uses="assistant_masks"),
)

SFT_LOSS = Feature(
    "the loss of LigerSFTTrainer with label smoothing or a `compute_loss_func`",
    Private("trl:SFTTrainer.compute_loss", uses="fused_lm_head, labels, shift_labels"),
)

COUNTED_METRICS = Feature(
    "reading the metrics of LigerSFTTrainer once a log",
    Private(
        "trl:SFTTrainer.compute_loss",
        uses="gather_for_metrics, label_mask, entropy, is_top1, item, _metrics, _total_train_tokens, _tp_size",
    ),
    Private("trl:SFTTrainer.log", uses="_metrics"),
    needed=False,
)

REWARD_METRICS = Feature(
    "reading the metrics of LigerRewardTrainer once a log",
    Private(
        "trl:RewardTrainer.compute_loss",
        uses="gather, gather_for_metrics, min, max, mean, item, _metrics, _total_train_tokens, _tp_size",
    ),
    Private("trl:RewardTrainer.log", uses="_metrics"),
    needed=False,
)

DPO_METRICS = Feature(
    "reading the metrics of LigerDPOTrainer once a log",
    Private(
        "trl:DPOTrainer._compute_loss",
        uses="gather, gather_for_metrics, sum, mean, item, _metrics, _total_train_tokens, _tp_size",
    ),
    needed=False,
)

KTO_METRICS = Feature(
    "reading the metrics of LigerKTOTrainer once a log",
    Private(
        "trl:KTOTrainer._compute_loss",
        uses="gather_for_metrics, sum, mean, clamp, nansum, item, _metrics, _total_train_tokens, _tp_size",
    ),
    needed=False,
)


def _policy_metrics_of(name: str) -> Feature:
    return Feature(
        f"reading the metrics of Liger{name}Trainer once a log",
        Private(f"trl:{name}Trainer._compute_loss", uses="nanmin, nanmax, gather, reduce, clamp, item, _metrics"),
        Private("trl.trainer.utils:nanmin", "tensor", uses="isnan, all, min"),
        Private("trl.trainer.utils:nanmax", "tensor", uses="isnan, all, max"),
        needed=False,
    )


GRPO_METRICS = _policy_metrics_of("GRPO")
RLOO_METRICS = _policy_metrics_of("RLOO")

EQUAL_BATCHES = Feature(
    "counts of tokens with `cp_size`",
    *(Private(f"trl:{name}Trainer._compute_loss", uses="_tp_size") for name in ("DPO", "KTO")),
)

SFT_PACKED_PARTS = Feature(
    "packed rows with `cp_size`",
    Private("trl:SFTTrainer.__init__", uses="add_fused_lm_head, cp_enabled, packing, eval_packing"),
)

SFT_OWN_LOSS = Feature(
    "`label_smoothing_factor` and `compute_loss_func` of LigerSFTTrainer, which TRL computes",
    Private("trl:SFTTrainer.compute_loss", uses="label_smoother, compute_loss_func"),
)


_COUNTED = "accelerator, process_index, gather, gather_object"  # of rows, which several processes may have


def _generation_of(name: str) -> Feature:
    trainer = f"trl.trainer.{name.lower()}_trainer:{name}Trainer"
    return Feature(
        f"the checks of prompts, completions and rewards, their groups, and the labelled rows, in Liger{name}Trainer",
        Private(f"{trainer}._generate_single_turn", "self, prompt_ids, ...", uses="args, bf16, fp16"),
        Private(f"{trainer}._calculate_rewards", "self, ...", uses="reward_funcs, gather"),
        Private(f"{trainer}._generate_and_score_completions", "self, inputs", uses=_COUNTED),
        Private(f"{trainer}._get_train_sampler", "self, ...", uses="batch_size"),
        Private(
            f"{trainer}._get_per_token_logps_and_entropies",
            "self, model, input_ids, attention_mask, logits_to_keep, batch_size, ...",
        ),
        Private("trl.trainer.utils:RepeatSampler.__iter__", uses="batch_size"),
        Private(f"{trainer}._prepare_inputs", uses="shuffle_sequence_dict, split_tensor_dict, steps_per_generation"),
        Private(f"{trainer}._compute_loss", "self, model, inputs", uses="aux_loss_enabled, accelerator, gather"),
    )


GRPO_GENERATION = _generation_of("GRPO")
RLOO_GENERATION = _generation_of("RLOO")

POLICY_LOSS = Feature(
    "the scale of GRPO's logged `policy_loss`",
    Private(
        "trl:GRPOTrainer._compute_loss",
        uses="_metrics, policy_loss, cispo, dapo, vespo, current_gradient_accumulation_steps",
    ),
    needed=False,
)

_REWARDS = "_metrics, rewards/chosen, rewards/rejected, precompute_ref_logps"
FIRST_STEP = Feature(
    "stopping in the first step if the reference is not the policy",
    Private("trl:DPOTrainer._compute_loss", uses=_REWARDS),
    Private("trl:KTOTrainer._compute_loss", uses=_REWARDS),
    Private("trl:GRPOTrainer._compute_loss", uses="_metrics, kl"),
    Private("trl:RLOOTrainer._generate_and_score_completions", uses="_metrics, kl"),
    Private("trl.trainer.utils:use_adapter", "model, adapter_name"),
    needed=False,
)


def _answers_of(name: str, columns: str) -> tuple[Private, ...]:
    trainer = f"trl:{name}Trainer"
    return (
        Private(f"{trainer}.__init__", uses="precompute_ref_logps, ref_model"),
        Private(f"{trainer}.compute_ref_log_probs", "self, model, inputs", uses="log_probs, fused_lm_head"),
        Private(f"{trainer}.compute_loss", "self, model, inputs, ...", uses="_compute_loss"),
        Private(f"{trainer}._compute_loss", "self, model, inputs, ...", uses=f"precompute_ref_logps, {columns}"),
    )


REFERENCE_FIRST = Feature(
    "the reference's answer before the policy's",
    *_answers_of("DPO", "ref_chosen_logps, ref_rejected_logps"),
    *_answers_of("KTO", "ref_logps, ref_KL_logps"),
    needed=False,
)


def _cache_of(name: str) -> Private:
    return Private(f"trl:{name}Trainer._precompute_ref_logps", uses="_precompute_model_hash, data_collator")


CACHED_REFERENCE = Feature(
    "caches of `precompute_ref_log_probs` that know how rows are cut", _cache_of("DPO"), _cache_of("KTO"), needed=False
)

_COMPLETIONS = "_logs, prompt, completion, rewards, advantages, extra"
LOGGED_COMPLETIONS = Feature(
    "completions in `report.html`",
    Private("trl:GRPOTrainer.log", uses=_COMPLETIONS),
    Private("trl:RLOOTrainer.log", uses=_COMPLETIONS),
    needed=False,
)

GENERATION_COUNTERS = Feature(
    "going on with the completions that a checkpoint holds",
    *(
        Private(f"trl:{name}Trainer._prepare_inputs", uses="_step, _buffered_inputs")
        for name in ("GRPO", "RLOO", "Distillation")
    ),
)

LOGGED_SINCE = Feature(
    "metrics since the last log in a resumed run",
    *(Private(f"trl:{name}Trainer.log", uses="_metrics") for name in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")),
    *(
        Private(f"trl.experimental.{name.lower()}:{name}Trainer.log", uses="_stored_metrics")
        for name in ("ORPO", "CPO")
    ),
    Private("trl:SFTTrainer.compute_loss", uses="_total_train_tokens"),
)

MERGED_SYNC = Feature(
    "sending merged adapters to vLLM without a change of their base",
    Private(
        "trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
        "self",
        uses="model, merge_adapter, unmerge_adapter, named_parameters",
    ),
    Private("trl.generation.vllm_generation:VLLMGeneration.sync_weights", uses="_iter_named_params"),
    Private("trl.generation.vllm_generation:VLLMGeneration._iter_fsdp2_params", uses="named_parameters"),
    Private("trl.generation.vllm_generation:VLLMGeneration.__init__", uses="_dist"),
    Private("trl.distributed:DistributedBackend.__init__", uses="fsdp_version"),
    needed=False,
)

REWARD_FUNCTIONS = Feature(
    "errors that name the reward function",
    Private("trl.trainer.utils:get_callable_name", "func"),
    Private("trl.trainer.utils:is_async_callable", "func"),
)

DISTILLATION = Feature(
    "the divergence of LigerDistillationTrainer",
    Private("trl.trainer.utils:create_model_from_path", "model_id, ..."),
    Private("trl:DistillationTrainer.__init__", uses="create_model_from_path, BaseTunerLayer"),
    Private(
        "trl:DistillationTrainer._compute_loss",
        "self, unwrapped_student, inputs, num_items_in_batch",
        uses="_chunked_divergence_loss, _get_last_hidden_state",
    ),
    Private("trl:DistillationTrainer._get_last_hidden_state", "self, unwrapped_model, ..."),
    Private(
        "trl.trainer.distillation_trainer:_chunked_divergence_loss",
        "student_hidden_states, teacher_hidden_states, student_lm_head_weight, teacher_lm_head_weight, "
        "completion_mask, beta, num_items_in_batch, student_lm_head_bias, teacher_lm_head_bias, student_logit_scale, "
        "teacher_logit_scale, student_final_logit_softcapping, teacher_final_logit_softcapping, temperature",
    ),
)

GKD = Feature(
    "the divergence of LigerGKDTrainer",
    Private("trl.models.utils:_ForwardRedirection", ""),
    Private(
        "trl.models.utils:_ForwardRedirection.__call__", "self, wrapper_module, original_module, method, args, kwargs"
    ),
    Private("trl.experimental.gkd:GKDTrainer.__init__", uses="AutoModelForCausalLM"),
    Private(
        "trl.experimental.gkd:GKDTrainer.training_step",
        "self, model, inputs, num_items_in_batch",
        uses="super, training_step, generate_on_policy_outputs, labels",
    ),
    Private(
        "trl.experimental.gkd:GKDTrainer.compute_loss",
        "self, model, inputs, return_outputs, num_items_in_batch",
        uses="generalized_jsd_loss",
    ),
    Private(
        "trl.experimental.gkd:GKDTrainer.generalized_jsd_loss",
        "student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch",
    ),
)


def _pairs_of(name: str, uses: str) -> Feature:
    trainer = f"trl.experimental.{name.lower()}:{name}Trainer"
    return Feature(
        f"the log-probabilities of Liger{name}Trainer",
        Private(f"{trainer}.concatenated_forward", "self, model, batch", uses=f"aux_loss_enabled, {uses}"),
        Private(f"{trainer}.concatenated_inputs", "batch, is_encoder_decoder, padding_value, device"),
        Private(f"{trainer}.tokenize_row", "self, feature, model"),
        Private(
            f"{trainer}.get_batch_loss_metrics",
            uses="concatenated_forward",
            unpacks="policy_chosen_logps, policy_rejected_logps, policy_chosen_logits, policy_rejected_logits, "
            "policy_nll_loss",
        ),
    )


ORPO_PAIRS = _pairs_of("ORPO", "padding_value")
CPO_PAIRS = _pairs_of("CPO", "pad_token_id, cpo_alpha, loss_type")

OFFLOADING = Feature(
    "`activation_offloading`",
    Private("trl.models.activation_offloading:get_act_offloading_ctx_manager", "model, ..."),
    Private("trl.models.activation_offloading:OffloadActivations.__init__", uses="pack_tensor, unpack_tensor"),
    *(
        Private(f"trl:{name}Trainer.__init__", uses="maybe_activation_offload_context")
        for name in ("SFT", "DPO", "KTO", "Reward")
    ),
)

SPLIT_REFERENCE = Feature(
    "splitting each layer of a reference or a teacher by itself under FSDP2, before TRL splits the rest",
    Private("trl.models.utils:prepare_fsdp", "model, accelerator", uses="fully_shard"),
    needed=False,
)
