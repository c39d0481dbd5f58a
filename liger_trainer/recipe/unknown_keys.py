"""What to say of keys that a recipe does not have: their name here, another trainer that has them, or a near one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.schema import TRAINERS, argument_classes

SYNONYMS = {
    **dict.fromkeys(("model", "model_name", "base_model", "model_id", "model_path"), "model_name_or_path"),
    **dict.fromkeys(("tokenizer", "tokenizer_name"), "tokenizer_name_or_path"),
    **dict.fromkeys(("data", "dataset", "data_path", "train_file", "train_files", "train_data"), "data_files"),
    **dict.fromkeys(("eval_data", "eval_file", "eval_dataset", "validation_file", "test_datasets"), "eval_data_files"),
    **dict.fromkeys(("val_set_size", "val_size", "test_size"), "test_split_size"),
    **dict.fromkeys(("output", "output_path", "save_dir", "out_dir"), "output_dir"),
    **dict.fromkeys(("lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("batch_size", "micro_batch_size", "train_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("eval_batch_size", "micro_eval_batch_size"), "per_device_eval_batch_size"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation", "accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps", "total_steps"), "max_steps"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len", "context_length"), "max_length"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup_ratio", "warmup"), "warmup_steps"),
    **dict.fromkeys(("optimizer", "optimizer_type"), "optim"),
    "wd": "weight_decay",
    **dict.fromkeys(("gradient_clipping", "grad_clip", "clip_grad_norm"), "max_grad_norm"),
    **dict.fromkeys(("precision", "torch_dtype", "compute_dtype"), "dtype"),
    **dict.fromkeys(("adapter", "lora", "use_lora", "finetuning_type"), "use_peft"),
    **dict.fromkeys(("lora_rank", "rank", "r"), "lora_r"),
    **dict.fromkeys(("lora_target", "target_modules", "lora_target_linear"), "lora_target_modules"),
    **dict.fromkeys(("quantization_bit", "load_4bit"), "load_in_4bit"),
    **dict.fromkeys(("sample_packing", "pack"), "packing"),
    **dict.fromkeys(("use_gradient_checkpointing", "checkpointing"), "gradient_checkpointing"),
    **dict.fromkeys(("flash_attention", "flash_attn", "attention", "attn"), "attn_implementation"),
    **dict.fromkeys(("chat_template", "template", "prompt_style"), "chat_template_path"),
    **dict.fromkeys(("train_on_responses_only", "mask_prompt"), "assistant_only_loss"),
    "train_on_prompt": "completion_only_loss",
    **dict.fromkeys(("preprocessing_num_workers", "dataset_processes", "num_proc"), "dataset_num_proc"),
    **dict.fromkeys(("rl", "stage", "method", "training_type"), "trainer"),
    **dict.fromkeys(("pref_beta", "dpo_beta", "kl_coef"), "beta"),
    **dict.fromkeys(("pref_loss", "rl_loss"), "loss_type"),
    **dict.fromkeys(("rewards", "reward_functions", "reward_fns"), "reward_funcs"),
    **dict.fromkeys(("num_rollouts", "group_size", "n_generations"), "num_generations"),
    "plot_loss": "loss_curve",
    **dict.fromkeys(("logger", "loggers", "tracker"), "report_to"),
    **dict.fromkeys(("deepspeed_config", "fsdp_config_file", "launcher_config"), "accelerate_config"),
    **dict.fromkeys(("field_mapping", "column_mapping", "rename_columns"), "columns"),
    "role_mapping": "roles",
    **dict.fromkeys(("default_system", "default_system_message", "system"), "system_prompt"),
}
"""Names that axolotl, LLaMA-Factory, Unsloth, torchtune and others have for a key, and the key."""


def unknown_keys(keys: Sequence[str], known: Sequence[str], where: str, trainer: str) -> RecipeError:
    """The error for `keys`, all in one line.

    Args:
        keys: The keys that are not known, in order.
        known: The keys of the trainer.
        where: The file, or the command line.
        trainer: The recipe's trainer.
    """
    hints = {key: _hint(key, known, trainer) for key in keys}
    if len(keys) == 1:
        hint = f"; {hints[keys[0]]}" if hints[keys[0]] else ""
        return RecipeError(
            f"{where}: unknown key `{keys[0]}` for `trainer: {trainer}`{hint}{'' if hint[-1:] == '?' else '.'}"
        )
    said = (f"`{key}`" + (f" ({hint})" if hint else "") for key, hint in hints.items())
    return RecipeError(f"{where}: unknown keys for `trainer: {trainer}`: {', '.join(said)}.")


def _hint(key: str, known: Sequence[str], trainer: str) -> str:
    same = SYNONYMS.get(key.lower(), key)
    if same in known:
        return f"it is `{same}` here"
    others = [other for other in TRAINERS if other != trainer and same in _keys_of(other)]
    if others:
        return f"`{same}` is a key of `trainer: {others[0]}`"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""


def _keys_of(trainer: str) -> set[str]:
    return {field.name for cls in argument_classes(trainer) for field in dataclasses.fields(cls) if field.init}
