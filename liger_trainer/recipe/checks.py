"""Checks of a recipe: keys that it does not have, values out of range, and keys that must agree.

An unknown key has another name here, belongs to another trainer, or is near to one that exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.schema import TRAINERS, argument_classes

if TYPE_CHECKING:
    from transformers import TrainingArguments


logger = logging.getLogger(__name__)

_AT_LEAST: dict[str, float] = {  # the smallest allowed value
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 2,  # a token has a target only if another follows it
    "max_completion_length": 1,
    "num_generations": 2,
    "num_generations_eval": 1,
    "num_iterations": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "lora_r": 1,
    "lora_alpha": 1,
    "top_k": 0,
    "sample_tokens": 1,
    "sample_steps": 1,
    "expert_parallel_size": 1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "adam_epsilon": 0,
    "neftune_noise_alpha": 0,
    "dataloader_num_workers": 0,
    "max_grad_norm": 0,
    "beta": 0,
    "desirable_weight": 0,
    "undesirable_weight": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "label_smoothing": 0,
    "router_aux_loss_coef": 0,
}
_SEED = (0, 2**32 - 1)  # the range that NumPy accepts
_ABOVE_ZERO = ("temperature", "repetition_penalty", "num_train_epochs", "logging_steps", "save_steps", "eval_steps")
_ONE_OF: dict[str, tuple[Any, ...]] = {  # TRL checks these in the first step
    "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
}

_PACKAGES = {"azure_ml": "azureml-mlflow", "flyte": "flytekit"}  # of trackers that are called otherwise


def check_ranges(values: Mapping[str, Any], source: Path) -> None:
    """Checks numbers of the right types against the range in which training makes sense; None is always allowed."""
    for key, value in values.items():
        allowed = None if value is None else _allowed(key, value)
        if allowed is not None:
            raise RecipeError(f"{source}: `{key}` is {value!r}; it must be {allowed}.")


def _allowed(key: str, value: Any) -> str | None:
    """What `key` may hold, if `value` is not allowed; else None."""
    if key in _AT_LEAST and not value >= _AT_LEAST[key]:
        return f"{_AT_LEAST[key]} or more"
    if key in _ABOVE_ZERO and not value > 0:
        return "above 0"
    if key in ("seed", "data_seed") and not _SEED[0] <= value <= _SEED[1]:
        return f"from {_SEED[0]} to {_SEED[1]}"
    if key == "test_split_size" and not 0 <= value < 1:
        return "a fraction of the data, 0 or more and below 1"
    if key == "optim_args" and any(part.count("=") != 1 for part in value.split(",")):
        return "pairs such as 'beta1=0.9, beta2=0.95'"
    if key in ("adam_beta1", "adam_beta2") and not 0 <= value < 1:
        return "0 or more and below 1"
    if key in ("top_p", "min_p", "label_smoothing_factor") and not 0 <= value <= 1:
        return "from 0 to 1"
    if key == "lora_target_modules" and (wrong := _pattern_problem(value)) is not None:
        return f"names of modules, or a regular expression ({wrong})"
    if key == "max_steps" and value != -1 and value < 1:
        return "1 or more, or -1 for the steps of `num_train_epochs`"
    if key in _ONE_OF and value not in _ONE_OF[key]:
        return "one of " + ", ".join(repr(choice) for choice in _ONE_OF[key])
    return None


def target_modules(names: Any) -> Any:
    """`lora_target_modules` for PEFT: TRL turns a list of one name into a pattern, which must match whole paths."""
    return [names] if isinstance(names, str) and re.fullmatch(r"[\w.]+", names) else names


def _pattern_problem(names: Any) -> str | None:
    """What is wrong with a single name, which PEFT reads as a regular expression; None if nothing is."""
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str):
        return None
    try:
        re.compile(name)
    except re.error as error:
        return str(error)
    return None


def check_agreement(values: Mapping[str, Any], source: Path) -> None:
    """Checks that keys agree with each other."""
    functions, weights = values.get("reward_funcs"), values.get("reward_weights")
    if functions and weights is not None and len(weights) != len(functions):
        raise RecipeError(
            f"{source}: `reward_weights` has {len(weights)} numbers and `reward_funcs` {len(functions)} names "
            f"({', '.join(functions)}); give one weight for each function, or leave `reward_weights` out."
        )
    quantised = [key for key in ("load_in_4bit", "load_in_8bit") if values.get(key)]
    if len(quantised) == 1 and not values.get("use_peft"):
        raise RecipeError(
            f"{source}: `{quantised[0]}` is true, but `use_peft` is false: quantised weights cannot be trained. Set "
            "`use_peft: true` for adapters on them (QLoRA)."
        )
    frozen = next((key for key in ("fp8_base", "packed_base") if values.get(key) in (True, "true")), None)
    if frozen and not values.get("use_peft"):
        raise RecipeError(
            f"{source}: `{frozen}` is true, but `use_peft` is false: such a base is frozen. Set `use_peft: true` for "
            f"adapters on it, or leave `{frozen}` out."
        )
    size, obstacle = values.get("expert_parallel_size") or 1, split_obstacle(values)
    if size > 1 and obstacle:
        raise RecipeError(f"{source}: `expert_parallel_size` is {size} and {obstacle}")
    if values["trainer"] == "reward" and values.get("sample_prompts"):
        raise RecipeError(f"{source}: `sample_prompts` is given, but a reward model writes no text; leave it out.")
    if values.get("sample_steps") and not values.get("sample_prompts"):
        raise RecipeError(
            f"{source}: `sample_steps` is {values['sample_steps']}, but there are no `sample_prompts`; give some, such "
            'as ["Who are you?"].'
        )
    if values.get("lora_target_parameters") and values.get("use_peft") and values.get("lora_dropout"):
        raise RecipeError(
            f"{source}: `lora_dropout` is {values['lora_dropout']}, but PEFT has no dropout in adapters of parameters, "
            "which `lora_target_parameters` names. Set `lora_dropout: 0.0`."
        )
    if values.get("lora_target_modules") and not values.get("use_peft"):
        logger.warning(
            "%s: `lora_target_modules` is given, but `use_peft` is false: the whole model is trained. Set `use_peft: "
            "true` for LoRA.",
            source,
        )


def check_schedule(training: TrainingArguments, source: Path) -> None:
    """Checks that the learning rate schedule can be built; the Trainer builds it last."""
    import torch
    from transformers import get_scheduler

    kind: Any = training.lr_scheduler_type
    options: Any = training.lr_scheduler_kwargs  # a mapping by now
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], training.learning_rate)
    try:
        get_scheduler(kind, dummy, num_warmup_steps=1, num_training_steps=10, scheduler_specific_kwargs=options)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{source}: `lr_scheduler_type: {kind.value}` cannot be used with `lr_scheduler_kwargs` "
            f"{options}: {first_line(error)}"
        ) from error


def check_trackers(training: TrainingArguments, source: Path) -> None:
    """Refuses trackers in `report_to` that are not known or not installed, which the Trainer finds with its model."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    asked: Any = training.report_to  # a list by now, empty for "none"
    installed = get_available_reporting_integrations() if asked else ()
    for name in asked:
        if name not in INTEGRATION_TO_CALLBACK:
            near = difflib.get_close_matches(name, INTEGRATION_TO_CALLBACK, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RecipeError(
                f"{source}: `report_to` is {name!r}, which is no tracker; transformers knows "
                f"{', '.join(INTEGRATION_TO_CALLBACK)}.{hint}"
            )
        if name not in installed:
            package = _PACKAGES.get(name, name)
            raise RecipeError(
                f"{source}: `report_to` is {name!r}, which is not installed here: `pip install {package}`, or leave it "
                "out."
            )


def check_generation(training: TrainingArguments, source: Path) -> None:
    """Refuses names in `generation_kwargs` that transformers would silently ignore; vLLM checks its own."""
    from transformers import GenerationConfig

    asked, known = getattr(training, "generation_kwargs", None) or {}, vars(GenerationConfig())
    for name in () if getattr(training, "use_vllm", False) else asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "give fields of `transformers.GenerationConfig`."
            raise RecipeError(f"{source}: `generation_kwargs` has {name!r}, which generation does not use; {hint}")


def split_obstacle(values: Mapping[str, Any]) -> str | None:
    """A key that excludes `expert_parallel_size`, why, and what to do; None if there is none."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if values.get(key):
            return f"`{key}` is true: split experts cannot be quantised. Set one of them to its default."
    names = values.get("lora_target_parameters")
    if values.get("use_peft") and names:
        return (
            f"`lora_target_parameters` is {names}: PEFT has no adapters on split parameters. Leave it out for "
            "adapters on linear layers only (`lora_target_modules`), or set `expert_parallel_size: 1`."
        )
    if values.get("use_vllm"):
        return (
            "`use_vllm` is true: TRL would give vLLM the weights of one process only. Set `use_vllm: false`, or "
            "`expert_parallel_size: 1` and `accelerate_config: fsdp2`."
        )
    return None


def generation_advice(error: Exception, values: Mapping[str, Any]) -> str:
    """What to change if TRL says that batches cannot be divided into groups of generations; else empty."""
    batch = "`per_device_{0}_batch_size` ({1}) times the processes"
    if "divisible by num_generations" in str(error):
        rounds = values["steps_per_generation"] or values["gradient_accumulation_steps"]
        made_of = batch.format("train", values["per_device_train_batch_size"])
        return (
            f" The generation batch is {made_of} times `steps_per_generation` ({rounds}; by default "
            "`gradient_accumulation_steps`): change one of them, or set `num_generations` to a divisor."
        )
    if "generations used for evaluation" in str(error):
        made_of = batch.format("eval", values["per_device_eval_batch_size"])
        return f" That batch is {made_of}: change it, or set `num_generations_eval` to a divisor."
    return ""


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
        hint = f"; {hints[keys[0]] or f'`liger-trainer keys {trainer}` lists the keys'}"
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
