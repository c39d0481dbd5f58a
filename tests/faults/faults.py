"""The deliberate faults that `tests.faults.plant` plants, at least one in every part of the product.

Kinds: `reference` (plain torch, on the CPU), `kernel` (Triton under its interpreter), `head`, `patching`, `trainer`,
`callback`, `checkpoint`, `wrapping` (several processes), `recipe`, `plan` and `cli`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement, and the tests that must fail with it.

    Args:
        name: What is wrong.
        kind: The part of the product, as above; faults of the kind `kernel` are tested under the interpreter.
        where: The function, class or constant that it is in, ``Class.method`` for a method, ``a|b`` where it may have
            either name; or the path of a recipe.
        old: A regular expression that matches once in it.
        new: What is put there; groups as in `re.Match.expand`.
        tests: Each ``part_of_the_path::function``.
        expression: Which of their parameter sets, as pytest's ``-k``.
    """

    name: str
    kind: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    expression: str = ""


REFERENCES = [
    Fault(
        "RMSNorm rounds after the weight", "reference", "rms_norm_reference",
        r"scale \* x_hat\.to\(x\.dtype\)$", "(scale * x_hat).to(x.dtype)",
        ("::test_reference_has_the_bits_of_the_hugging_face_module",), "llama or Llama",
    ),
    Fault(
        "LayerNorm without epsilon", "reference", "layer_norm_reference",
        r"bias, eps\)", "bias, 0.0)", ("::test_layer_norm_reference_is_torchs",),
    ),
    Fault(
        "fused add norms x alone", "reference", "fused_add_rms_norm_reference",
        r"rms_norm_reference\(new_residual,", "rms_norm_reference(x,",
        ("norm::test_references_are_the_formulas",),
    ),
    Fault(
        "GroupNorm with one group", "reference", "group_norm_reference",
        r"torch\.group_norm\(x\.to\(compute\), num_groups", "torch.group_norm(x.to(compute), 1",
        ("norm::test_references_are_the_formulas",),
    ),
    Fault(
        "DyT stretches its input", "reference", "dyt_reference",
        r"torch\.tanh\(alpha", "torch.tanh(1.01 * alpha", ("::test_references_are_the_formulas",),
    ),
    Fault(
        "PolyNorm takes its powers in the other order", "reference", "poly_norm_reference",
        r"\(3, 2, 1\)", "(1, 2, 3)", ("::test_references_are_the_formulas",),
    ),
    Fault(
        "modulated norm multiplies by the scale alone", "reference",
        "_reference_of_groups|modulated_rms_norm_reference",
        r"\(1 \+ scale\.to", "(scale.to", ("::test_references_are_the_formulas",),
    ),
    Fault(
        "RoPE turns the other way", "reference", "rope_reference",
        r"torch\.cat\(\(-second, first\)", "torch.cat((second, -first)",
        ("rope::test_reference_is_the_models_own",),
    ),
    Fault(
        "SwiGLU's up is not clamped from below", "reference", "swiglu_reference",
        r"up\.clamp\(min=-limit, max=limit\)", "up.clamp(max=limit)",
        ("::test_clamped_swiglu_is_deepseek_v4", "::test_a_limit_counts_though_small_inputs_do_not_reach_it"),
    ),
    Fault(
        "GeGLU always takes the exact GELU", "reference", "geglu_reference",
        r"approximate=approximate", 'approximate="none"', ("::test_reference_is_the_models_own",), "geglu or gelu",
    ),
    Fault(
        "squared ReLU is a ReLU", "reference", "relu_squared_reference",
        r"\.square\(\)", "", ("relu_squared::test_reference_is_the_models_own",),
    ),
    Fault(
        "sparsemax keeps one class too many", "reference", "sparsemax_reference",
        r"ordered \* count > excess", "ordered * count > excess - 0.5",
        ("::test_sparsemax_reference_is_the_projection_onto_the_simplex", "::test_sparsemax_by_hand"),
    ),
    Fault(
        "cross entropy smooths without the class weights", "reference", "_row_statistics",
        r"\(log_probs \* weights\)", "log_probs", ("::test_reference_is_torchs_cross_entropy",),
    ),
    Fault(
        "the gradient of the z-loss is halved", "reference", "row_gradient_torch_",
        r"2\.0 \* options\.z_loss", "options.z_loss",
        ("::test_row_step_in_torch_is_the_derivative_of_the_reference",),
    ),
    Fault(
        "entropies have the wrong sign", "reference", "log_probs_reference",
        r"entropy = -\(", "entropy = (", ("::test_outputs_and_gradients_equal_the_reference",),
    ),
    Fault(
        "the mixture of a JSD is taken by halves", "reference", "divergence_rows_torch_",
        r"gradient = \(1 - beta\) \* s", "gradient = 0.5 * s",
        ("::test_loss_and_gradients_equal_the_reference",), "jsd",
    ),
    Fault(
        "total variation is not halved", "reference", "elements_reference|_elements_reference|_elements|_values",
        r"0\.5 \* \(x - y\)\.abs\(\)", "(x - y).abs()", ("::test_tvd_and_its_gradient_at_a_tie",),
    ),
    Fault(
        "cross entropy of a fused CE and TVD takes ignored tokens", "reference", "fused_ce_tvd_reference",
        r"torch\.where\(ignored, 0\.0, ce\)", "ce", ("::test_terms_are_torchs",),
    ),
    Fault(
        "GRPO clips from one side alone", "reference", "grpo_loss_from_log_probs",
        r"ratio\.clamp\(low, high\)", "ratio.clamp(max=high)",
        ("::test_losses_are_those_computed_by_hand", "losses/::test_grpo"),
    ),
    Fault(
        "LoRA without its scaling", "reference", "lora_linears_reference",
        r"b\.to\(x\.dtype\)\) \* scaling", "b.to(x.dtype))",
        ("patching/test_lora::test_a_layer", "::test_layers_are_the_reference", "nf4::test_an_mlp_is_the_reference",
         "lora::test_layers_of_one_input_are_the_reference"),
    ),
    Fault(
        "NF4 forgets the offset of nested scales", "reference", "nf4_dequantize_reference",
        r" \+ offset$", "", ("nf4::test_the_formula", "::test_bit_for_bit_what_bitsandbytes_makes"),
    ),
    Fault(
        "experts add no offset to up", "reference", "moe_experts_reference",
        r" \* \(up \+ up_offset\)", " * up", ("moe::test_values_and_gradients_in_float64",),
    ),
    Fault(
        "grouped routing looks at one expert a group", "reference", "grouped_topk_sigmoid_routing_reference",
        r"grouped\.topk\(2\)", "grouped.topk(1)", ("router::test_reference_is_the_models_own",),
    ),
    Fault(
        "a tile begins at the wrong row", "reference", "_tile_table_reference|tile_table_reference",
        r"present\]\) \* block_rows", "present]) * (block_rows - 1)", ("::test_rows_and_tiles",),
    ),
    Fault(
        "padding counts in the load", "reference", "router_statistics_reference",
        r"weights\.repeat_interleave\(top_k\)", "weights.new_ones(chosen.numel())",
        ("::test_equals_the_formulas_in_float64",),
    ),
    Fault(
        "a padding id of the embedding learns", "reference", "embedding_reference",
        r"weight, padding_idx\)", "weight)", ("embedding::test_float64_runs_as_reference", "nn/::test_embedding"),
    ),
]  # fmt: skip

KERNELS = [
    Fault(
        "RMSNorm's projection forgets the weight", "kernel", "_rms_norm_backward_kernel",
        r"tl\.sum\(g \* x_hat", "tl.sum(dy * x_hat", ("::test_rms_norm_is_as_accurate_as_eager",), "128",
    ),
    Fault(
        "LayerNorm's gradient keeps its mean", "kernel", "_layer_norm_backward_kernel",
        r"g - mean_g - x_hat", "g - x_hat", ("::test_layer_norm_is_as_accurate_as_eager",), "128",
    ),
    Fault(
        "GroupNorm's variance is of the wrong mean", "kernel", "group_norm_backward_kernel",
        r"g - mean_g - x_hat", "g - x_hat", ("group_norm::test_only_parameters_with_gradients",
         "norm::test_is_as_accurate_as_eager"), "group_norm or only_parameters",
    ),
    Fault(
        "RoPE's second half takes the first cosine", "kernel", "rope_kernel|_rope_kernel",
        r"q2 \* cos2 \+ q1 \* sin2", "q2 * cos1 - q1 * sin2", ("rope::test_float32_equals_float64",),
    ),
    Fault(
        "the derivative of SiLU drops a term", "kernel", "_activation_and_derivative",
        r"derivative = sigmoid \+ x \* \(sigmoid \* \(1\.0 - sigmoid\)\)$", "derivative = sigmoid",
        ("gated::test_float32_equals_float64",), "silu or swiglu",
    ),
    Fault(
        "cross entropy's gradient leaves smoothing out", "kernel",
        "_cross_entropy_row_kernel|cross_entropy_row_kernel|_row_kernel|_kernel",
        r"spread \+= soft \* weight_sum", "spread += 0.0", ("cross_entropy::test_cross_entropy",),
    ),
    Fault(
        "reverse KL without its mean", "kernel", "_divergence_row_kernel|divergence_row_kernel|_kernel",
        r"\* LN2 - soft\)", "* LN2)", ("::test_row_kernel",), "reverse",
    ),
    Fault(
        "JSD's terms swap their weights", "kernel", "_terms",
        r"slope \+ beta \* p", "slope + (1.0 - beta) * p", ("::test_elementwise",),
    ),
    Fault(
        "the weight gradient skips a chunk of tokens", "kernel", "_weight_gradient_kernel",
        r"range\(tl\.cdiv\(tokens, DEPTH\)\)", "range(tokens // DEPTH)",
        ("weight_gradient::test_error_is_that_of_one_rounding",),
    ),
    Fault(
        "adapters are not scaled", "kernel", "_load_matrix",
        r"\(matrix\.to\(tl\.float32\) \* scaling\)", "matrix.to(tl.float32)", ("lora_gated::test_against_float64",),
    ),
    Fault(
        "NF4 swaps the halves of a byte", "kernel", "_kernel|_nf4_kernel|_dequantize_kernel|nf4_kernel",
        r"packed >> 4", "packed & 15", ("nf4::test_the_bits_of_the_reference",),
    ),
    Fault(
        "experts get the bias of the first one", "kernel", "_grouped_rows_kernel",
        r"bias_ptr \+ expert \* columns", "bias_ptr",
        ("moe::test_values_and_gradients", "moe::test_values_and_gradients_of_the_kernels"),
    ),
    Fault(
        "the weight gradient of an expert loses rows", "kernel", "_grouped_weights_kernel",
        r"exists = row < end$", "exists = row < end - 1",
        ("moe::test_values_and_gradients", "moe::test_values_and_gradients_of_the_kernels"),
    ),
    Fault(
        "routing takes the highest of equal experts", "kernel", "_keys",
        r"\(\(1 << LOG_LANES\) - 1 - lanes\)", "lanes", ("router::test_equal_numbers_go_to_the_lower_expert",),
    ),
    Fault(
        "softmax's gradient keeps its mean", "kernel", "backward_kernel|_backward_kernel|_softmax_backward_kernel",
        r"dx = y \* \(dy - tl\.sum\(dy \* y, axis=1, keep_dims=True\)\)", "dx = y * dy",
        ("softmax::test_float32_equals_float64",),
    ),
    Fault(
        "runs of an embedding's ids lose their rest", "kernel", "_join_runs_kernel",
        r"total \+= tl\.sum\(rest, axis=0\)", "total += 0.0", ("embedding::test_runs_of_every_kind",),
    ),
    Fault(
        "load balancing forgets the z-loss's factor", "kernel",
        "backward_kernel|_router_statistics_backward_kernel|_backward_kernel",
        r"2\.0 \* of_squares", "of_squares",
        ("load_balancing::test_equals_the_reference_in_float64", "::test_kernels_equal_the_reference_in_float64"),
    ),
]  # fmt: skip

HEAD = [
    Fault(
        "labels are not shifted", "head", "_next_token_labels",
        r"value=IGNORE_INDEX\)\[:, 1:\]", "value=IGNORE_INDEX)[:, :-1]",
        ("trainers/::test_shifted_labels_and_what_was_asked_for", "trainers/test_parity::test_sft"),
    ),
    Fault(
        "a gradient that was computed is not rescaled", "head", "rescale_",
        r"tensor\.mul_\(upstream\.item\(\) / expected\.item\(\)\)", "pass",
        ("linear_cross_entropy::test_retained_graph_gives_the_right_gradient_for_every_upstream_gradient",),
    ),
    Fault(
        "a second derivative is silently wrong", "head", "refuse_double_backward",
        r"if torch\.is_grad_enabled\(\):", "if False:", ("linear_cross_entropy::test_double_backward_is_refused",),
    ),
    Fault(
        "views do not see changes in place", "head", "DeferredLogits.add_view",
        r"^ +self\.views = [^\n]*\n", "", ("deferred_logits::test_changes_in_place_are_seen_by_views",),
    ),
]  # fmt: skip

PATCHING = [
    Fault(
        "any difference counts as equal", "patching", "FP32_TOLERANCE", r"1e-5", "1e5",
        ("patching/::test_subtly_different_is_left_alone_with_the_reason", "patching/::test_not_equal"),
    ),
    Fault(
        "gradients are not compared", "patching", "_run",
        r"for tensor in \(\*outputs, \*gradients\)", "for tensor in (*outputs,)", ("patching/::test_not_equal",),
    ),
    Fault(
        "epsilon is the default", "patching", "rms_norm_forward",
        r"return rms_norm\(hidden_states, weight, getattr\(self, eps\)", "return rms_norm(hidden_states, weight, 1e-6",
        ("patching/::test_unknown_family_with_a_known_formula_is_patched", "families::test_report"),
    ),
    Fault(
        "a foreign forward is replaced", "patching", "overriding_forward",
        r"if bound is None or is_bound_by_us\(module\):", "if True:",
        ("patching/::test_foreign_override_is_left_alone_and_named",),
    ),
    Fault(
        "dropout of an adapter does not scale", "patching", "_adapters",
        r"scaling / \(1 - dropout\.p\)", "scaling", ("patching/::test_dropout_draws_the_masks_that_peft_draws",),
    ),
    Fault(
        "hooks on a part are passed by", "patching", "is_unseen|is_unhooked",
        r"if module\._forward_hooks or [^\n]*\n +return False\n", "", ("patching/::test_hooks_on_a_part_are_called",),
    ),
    Fault(
        "merged adapters are added again", "patching", "_has_plain_adapters",
        r"module\.disable_adapters or module\.merged", "module.disable_adapters",
        ("patching/test_lora::test_disabling_and_merging_in_the_middle",),
    ),
    Fault(
        "experts forget their limit", "patching", "ExpertsFormula._sum",
        r"limit=self\.limit", "limit=None", ("::test_every_class_of_transformers_computes_and_learns_as_its_own_loop",
         "::test_loss_and_gradients_are_those_of_the_models_own_loop"), "gpt_oss or GptOss",
    ),
    Fault(
        "a tiled MLP misses its switch", "patching", "_probe_gated_mlp",
        r'enabled\("tiled_mlp"\)', "False", ("tiled_mlp::test_it_is_off_by_default_and_follows_the_component",),
    ),
]  # fmt: skip

TRAINERS = [
    Fault(
        "the temperature is forgotten", "trainer", "token_statistics",
        r"options\.kernel_outputs, options\.temperature", "options.kernel_outputs, 1.0",
        ("trainers/test_parity::test_grpo_options", "::test_deferred_logits"),
    ),
    Fault(
        "a pair is scored over its prompt", "trainer", "forward_pairs",
        r'pairs\["concatenated_labels"\]\[:, 1:\] != IGNORE_INDEX', "attention_mask[:, 1:] == 1",
        ("parity_orpo_cpo::test_logs_and_weights_are_those_of_trl",), "simpo or cpo",
    ),
    Fault(
        "smoothing is not divided by the items", "trainer", "FusedLabelSmoother.__call__",
        r"return loss / torch\.as_tensor\(num_items_in_batch", "return loss / torch.as_tensor(labels.numel()",
        ("label_smoothing::test_value_and_gradient",),
    ),
    Fault(
        "a step without labels is 0 / 0", "trainer", "LigerTrainerMixin.compute_loss",
        r"num_items_in_batch\.clamp\(min=1\)", "num_items_in_batch", ("trainers/::test_all_labels_ignored",),
    ),
    Fault(
        "the auxiliary loss is a sum over micro-batches", "trainer", "averaged_aux_loss",
        r"coefficient / factor", "coefficient",
        ("router_aux_loss::test_gradients_and_loss_are_those_of_the_mean",),
    ),
    Fault(
        "GKD turns its divergence round", "trainer", "LigerGKDTrainer.generalized_jsd_loss",
        r"return divergence\(student_logits, teacher_logits, labels, beta, temperature",
        "return divergence(student_logits, teacher_logits, labels, 1.0 - beta, temperature",
        ("parity_distillation::test_gradients_are_those_of_trl",), "gkd",
    ),
    Fault(
        "GKD's loss forgets its temperature", "trainer", "LigerGKDTrainer.generalized_jsd_loss",
        r"labels, beta, temperature, num_items_in_batch\)\.loss", "labels, beta, 1.0, num_items_in_batch).loss",
        ("parity_distillation::test_the_loss_of_deferred_logits_divides_them_by_the_temperature",),
    ),
    Fault(
        "the fused head adds the auxiliary loss twice", "trainer", "fused_output",
        r"loss = loss \+ getattr", "loss = loss + 2.0 * getattr",
        ("trl_trainers::test_the_loss_of_the_fused_head_has_the_auxiliary_loss_once",),
    ),
    Fault(
        "on-policy distillation turns its divergence round", "trainer", "_divergence_loss",
        r"labels, beta, temperature", "labels, 1.0 - beta, temperature",
        ("parity_distillation::test_logs_and_weights_are_those_of_trl",), "distillation",
    ),
    Fault(
        "evaluation counts batches without a label", "trainer", "EvaluatingMixin.prediction_step",
        r"if labelled is not None:", "if False:",
        ("evaluating::test_a_batch_without_a_label_is_left_out_with_a_warning",),
    ),
    Fault(
        "the reference model has another temperature", "trainer", "LigerTRLMixin._add_fused_lm_head",
        r"StatisticsOptions\(outputs, temperature,", "StatisticsOptions(outputs, temperature * 1.01,",
        ("parity::test_dpo_losses", "trainers/test_parity::test_rloo"), "sigmoid or rloo",
    ),
    Fault(
        "the z-loss of the routers is not accumulated", "trainer", "LigerTrainerMixin.compute_loss",
        r" / loss_divisor\(self, num_items_in_batch\)", "",
        ("router_losses::test_z_loss_is_added_to_the_loss_and_logged",),
    ),
    Fault(
        "ids beyond the embedding are not looked for", "trainer", "checked_collator",
        r"return [A-Za-z_]*Collator\([^\n]*\)", "return collator",
        ("trainers/test_bad_input::test_token_beyond_the_embedding",),
    ),
]  # fmt: skip

CALLBACKS = [
    Fault(
        "the guard counts nothing", "callback", "NonFiniteGuardCallback._report",
        r"self\.stopped = self\.action == \"stop\"", "self.stopped = False",
        ("callbacks/::test_guard_stops_with_a_checkpoint_of_the_last_good_state",),
    ),
    Fault(
        "clipping takes another norm", "callback", "NonFiniteGuardCallback.observe_gradients",
        r"torch\.linalg\.vector_norm\(stacked\)", "torch.linalg.vector_norm(stacked, 1)",
        ("trainers/::test_the_guard_clips_as_torch_does",),
    ),
    Fault(
        "the rate counts evaluations", "callback", "ThroughputCallback.on_evaluate",
        r"training=False", "training=True", ("callbacks/::test_throughput_counts_batches_and_leaves_evaluation_out",),
    ),
    Fault(
        "a frozen weight costs as much as a trained one", "callback", "flops_per_token",
        r"6 if parameter\.requires_grad else 4", "6", ("callbacks/::test_flops_formula",),
    ),
    Fault(
        "a batch without a label is not noticed", "callback", "LabelledShareCallback.count",
        r"empty = ~torch", "empty = torch", ("trainers/::test_a_batch_without_a_label_is_one_warning_with_its_step",),
    ),
]  # fmt: skip

CHECKPOINTS = [
    Fault(
        "a checkpoint is written under its name", "checkpoint", "WholeCheckpointsMixin._save_checkpoint",
        r"self\._saving = True", "self._saving = False; staged = final",
        ("trainers/test_checkpoints::test_killed_while_writing",),
    ),
    Fault(
        "a shard that is missing is not seen", "checkpoint", "damage",
        r"if missing:", "if False:", ("trainers/::test_a_shard_that_is_missing",),
    ),
    Fault(
        "arguments that a checkpoint overrules go without a warning", "checkpoint", "_overruled",
        r"if before\[key\] != after\[key\]", "if False",
        ("trainers/::test_arguments_that_the_checkpoint_overrules_are_one_warning",),
    ),
    Fault(
        "a second run writes in the same folder", "checkpoint", "_lock",
        r"return False", "return True", ("trainers/::test_the_second_process_is_refused_and_the_first_one_named",),
    ),
    Fault(
        "a longer schedule keeps its old rate", "checkpoint", "ResumingMixin._load_optimizer_and_scheduler",
        r"self\.lr_scheduler\.step\(\)", "self.lr_scheduler.last_epoch += 1",
        ("trainers/::test_a_longer_schedule_has_its_own_rate_from_the_first_step_on",),
    ),
]  # fmt: skip

WRAPPINGS = [
    Fault(
        "FSDP2's shards get the sum", "wrapping", "whole_parameter",
        r'Partial\("avg"\)', 'Partial("sum")', ("distributed/::test_logits_are_right_or_refused",),
    ),
    Fault(
        "ZeRO-3 does not gather the head again", "wrapping", "through_owner",
        r"return gathering\.apply\(result\)", "return result",
        ("trainers/::test_zero3_gathers_the_head_again_for_the_backward",),
    ),
    Fault(
        "processes load the experts of the next one", "wrapping", "load_balancing|_losses",
        r"dist\.all_reduce\(counted, group=process_group\)", "pass",
        ("distributed/test_load_balancing_gloo::test_two_processes",),
    ),
    Fault(
        "processes of a tensor-parallel group count twice", "wrapping", "process_scale",
        r" // trainer\.get_tp_size\(\)", "", ("trainers/test_tensor_parallel::test_two_processes_log_what_one_does",),
    ),
    Fault(
        "tokens come back to the wrong expert's rows", "wrapping", "_bring_back_backward",
        r"dout\.index_select\(0, order // top_k\)", "dout.index_select(0, order.flip(0) // top_k)",
        ("distributed/test_expert_parallel::test_two_processes_are_one",),
    ),
    Fault(
        "processes decide apart about a NaN", "wrapping", "StopOnSignalCallback._of_all",
        r"ReduceOp\.MAX\)\n            return", "ReduceOp.MIN)\n            return",
        ("cli/::test_a_signal_that_one_rank_gets_ends_all_of_them",),
    ),
]  # fmt: skip

RECIPES = [
    Fault(
        "a recipe has a misspelt key", "recipe", "recipes/gemma3_4b_dpo.yaml",
        r"^learning_rate:", "learning_rte:", ("test_recipes::test_every_key_is_known_and_the_arguments_are_accepted",),
    ),
    Fault(
        "a recipe names a loss that is none", "recipe", "recipes/llama3_8b_simpo.yaml",
        r'^loss_type: .*$', 'loss_type: "simplo"', ("cli/test_smoke::test_every_shipped_recipe",), "simpo",
    ),
    Fault(
        "the command line does not win", "recipe", "check_values",
        r"parse_known_args\(list\(overrides\)\)", "parse_known_args([])",
        ("test_recipes::test_command_line_wins_over_the_file",),
    ),
    Fault(
        "a key that is not known is passed by", "recipe", "check_values",
        r"raise _unknown\(key, list\(actions\), str\(source\), trainer\)", "continue", ("cli/::test_misspelt_key",),
    ),
    Fault(
        "values out of their range pass", "recipe", "_allowed",
        r"not value >= _AT_LEAST\[key\]", "False",
        ("cli/::test_values_that_no_run_can_mean", "cli/::test_a_negative_beta"),
    ),
    Fault(
        "renamed columns keep the name in the way", "recipe", "renamed",
        r"rows\.rename_columns\(\{old: new", "rows.rename_columns({new: old", ("cli/::test_columns_are_renamed",),
    ),
    Fault(
        "a smoke run keeps the recipe's rewards", "recipe", "_small_generation",
        r"if given & set\(rewards\)", "if True", ("cli/test_smoke::test_every_shipped_recipe",), "grpo",
    ),
]  # fmt: skip

PLANS = [
    Fault(
        "AdamW keeps one state", "plan", "_IN_DTYPE", r'"adamw_torch_fused": 2', '"adamw_torch_fused": 1',
        ("plan/::test_states_are_those_of_the_real_optimizer", "plan/::test_optimizer_states",
         "plan/::test_fsdp2_splits_fp32_weights_and_states"),
    ),
    Fault(
        "the fused head takes no memory", "plan", "head_memory",
        r"HeadMemory\(chunk \+ ", "HeadMemory(", ("plan/test_estimate::test_head",),
    ),
    Fault(
        "every setting is said to fit", "plan", "_row", r"memory\.total <= room", "True",
        ("plan/::test_where_nothing_fits", "cli/::test_what_fits_nowhere_says_what_would"),
    ),
]  # fmt: skip

COMMANDS = [
    Fault(
        "a mistake of the user has the exit code of a crash", "cli", "_run|_run_recipe_file",
        r"return 2 if isinstance\(error, RecipeError\) else 1", "return 1",
        ("cli/::test_misspelt_key",),
    ),
    Fault(
        "the number of processes is not handed on", "cli", "launch_command",
        r'command \+= \["--num_processes", str\(num_processes\)\]', "pass",
        ("cli/::test_named_config_and_number_of_processes",),
    ),
    Fault(
        "doctor finds every version good", "cli", "versions",
        r"SpecifierSet\(wanted\)\.contains\([^\n]*\)", "True", ("cli/::test_versions_out_of_range_and_missing",),
    ),
    Fault(
        "errors of a broken collective count as causes", "cli", "lost_a_peer",
        r'or "gloo/transport/" in str\(error\)', "",
        ("cli/::test_the_error_of_a_broken_collective_is_recognised",),
    ),
]  # fmt: skip

FAULTS = [
    *REFERENCES, *KERNELS, *HEAD, *PATCHING, *TRAINERS, *CALLBACKS, *CHECKPOINTS, *WRAPPINGS, *RECIPES, *PLANS,
    *COMMANDS,
]  # fmt: skip
