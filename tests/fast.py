"""What `make fast` runs: every operator's reference, the proofs of the patching, a step of each trainer, the recipes.

Tests are named by their functions, so that files may be split and moved; `tests/test_fast.py` finds a name that is no
test's any more.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FOLDERS = ("kernels", "liger/losses", "liger/operators")
"""Folders whose tests all run."""
LEFT_OUT = re.compile("compile|gradcheck|opcheck|one_graph|finite_differences")
"""Of these folders: what takes long, and looks at more than values and gradients."""

SOME: dict[str, tuple[str, ...]] = {
    # patching
    "test_equal": (),
    "test_not_equal": (),
    "test_more_rounding_than_the_original_is_refused_and_less_is_not": (),
    "test_unknown_family_with_a_known_formula_is_patched": (),
    "test_subtly_different_is_left_alone_with_the_reason": (),
    "test_foreign_override_is_left_alone_and_named": (),
    "test_hooks_run_on_patched_modules": (),
    "test_switches": (),
    "test_strict_lists_everything_and_leaves_the_model_plain": (),
    "test_report": ("llama", "gemma", "mixtral", "phi3"),
    "test_fp32_loss_and_gradients_equal": (),
    "test_revert_restores_exactly": ("llama",),
    "test_a_layer": (),
    "test_all_linear": (),
    "test_dropout_draws_the_masks_that_peft_draws": (),
    "test_disabling_and_merging_in_the_middle": (),
    "test_hooks_on_a_part_are_called": (),
    "test_all_linear_in_4_bits": (),
    "test_every_class_of_transformers_computes_and_learns_as_its_own_loop": ("Mixtral", "GptOss", "Qwen3Moe"),
    "test_loss_and_every_gradient": (),
    "test_loss_and_gradients_are_the_models": (),
    "test_loss_and_gradients_are_those_of_the_models_own_loop": (),
    "test_a_limit_counts_though_small_inputs_do_not_reach_it": (),
    "test_recompute": (),
    "test_it_is_off_by_default_and_follows_the_component": (),
    "test_every_layer_is_fused": (),
    "test_layouts": (),
    "test_what_was_not_proved_runs_as_it_did": (),
    "test_transformers_routers": (),
    "test_what_is_not_proved_runs_the_classs_own_forward": (),
    "test_a_model_gives_the_same_losses_and_gradients": (),
    # head
    "test_cross_entropy": (),
    "test_changes_in_place_are_seen_by_views": (),
    "test_recorded_without_building_then_builds_the_same": (),
    "test_deferred_logits": (),
    "test_from_built_logits": (),
    # trainers
    "test_logs_and_weights_are_those_of_the_stock_trainer": ("plain", "default", "label_smoothing", "accumulation"),
    "test_logs_and_weights_are_those_of_trl": (
        *("gkd-defaults", "gkd-temperature", "distillation-defaults", "distillation-forward"),
        *("orpo-defaults", "cpo-defaults", "cpo-simpo-alpha0", "reward-defaults"),
        *("[defaults]", "[completions]", "[nll]"),
    ),
    "test_dpo_losses": ("[sigmoid]", "[ipo]"),
    "test_kto": ("[kto]",),
    "test_sft": ("label_smoothing_lora", "dft_softcap"),
    "test_grpo_options": ("[temperature]", "[moe]"),
    "test_rloo": ("[default]",),
    "test_gradients_are_those_of_trl": (),
    "test_value_and_gradient": (),
    "test_all_labels_ignored": (),
    "test_a_batch_without_a_label_is_left_out_with_a_warning": (),
    "test_shifted_labels_and_what_was_asked_for": (),
    "test_gradients_and_loss_are_those_of_the_mean": (),
    "test_z_loss_is_added_to_the_loss_and_logged": (),
    "test_token_beyond_the_embedding": (),
    "test_trainer": (),
    "test_the_guard_clips_as_torch_does": (),
    # recipes
    "test_recipe_means_the_same_as_yaml_and_as_python": (),
    "test_every_key_is_known_and_the_arguments_are_accepted": (),
    "test_command_line_wins_over_the_file": (),
    "test_every_shipped_recipe": (
        *("quickstart]", "llama3_8b_simpo", "llama3_8b_sft_lora", "gemma3_4b_dpo]", "gemma3_4b_grpo]", "llama3_8b_kto"),
        *("llama3_8b_orpo", "qwen3_30b_a3b_sft]"),
    ),
    "test_misspelt_key": (),
    "test_values_out_of_range": (),
    "test_columns_are_renamed": (),
    "test_columns_of_different_kinds": (),
}
"""Test functions elsewhere, and a part of the ids of the parameter sets that run; all of them where there is none."""


def in_folders(path: Path) -> bool:
    """Whether a test file is in one of `FOLDERS`."""
    return path.relative_to(TESTS).as_posix().startswith(tuple(f"{folder}/" for folder in FOLDERS))


def is_fast(item: pytest.Item) -> bool:
    """Whether `item` belongs to the fast tests."""
    if in_folders(item.path):
        return not LEFT_OUT.search(item.name)
    parts = SOME.get(getattr(item, "originalname", item.name))
    return parts is not None and (not parts or any(part in item.name for part in parts))


def holds_fast_tests(path: Path) -> bool:
    """Whether a test file is to be read for the fast tests."""
    if in_folders(path) or path.relative_to(TESTS).parts[0].startswith("gpu"):
        return in_folders(path)
    return any(name in SOME for name in re.findall(r"^def (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
