"""Reads a recipe for a plan. Only the configuration of the model is read, not its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from liger_trainer.attention.config_names import NAME
from liger_trainer.callbacks.rounded_updates import LEAST_SHARE, expected_share
from liger_trainer.configs.flags import activation_memory_of, kernel_config_of
from liger_trainer.configs.liger_adamw import LIGER_ADAMW, liger_adamw_options
from liger_trainer.packed.formats import bytes_of_weights
from liger_trainer.packed.loading import method_of, quantization_of
from liger_trainer.parallel.sequences import reason_of_sizes
from liger_trainer.patching.attention import find_attention
from liger_trainer.patching.head import check_logits_memory
from liger_trainer.patching.probe import Probe
from liger_trainer.patching.shared_layers import METHOD
from liger_trainer.plan.parameters import count_parameters, decoder_layers
from liger_trainer.plan.splitting import is_known
from liger_trainer.plan.work import HeadSettings, Run, Work, named_attention, read_layer_shape
from liger_trainer.recipe.checks import target_modules
from liger_trainer.recipe.experts import check_expert_count, check_loading_in_4_bits, count_experts
from liger_trainer.recipe.file import RecipeError, accelerate_config, find_recipe, first_line, read_recipe
from liger_trainer.recipe.load import check_values
from liger_trainer.recipe.model import check_packed_base, config_of_values, model_class, published_config
from liger_trainer.recipe.schema import TRAINERS, mapping
from liger_trainer.recipe.smoke import shrink
from liger_trainer.tools.planning.layouts import obstacles
from liger_trainer.trainers.checks.packed_base import keeps_packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from liger_trainer.configs.kernel_config import KernelConfig

_ADAMS = ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit", "adamw_32bit")  # which round


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A recipe as a plan sees it."""

    source: Path  # the recipe's file
    values: Mapping[str, Any]  # all its keys
    run: Run  # model and work
    notes: tuple[str, ...]  # assumptions, and memory that is not counted
    shared_experts: int = 0  # experts per layer that GPUs can share; 0 if there are none or they cannot be split
    # Bytes that checkpointed layers may keep, or ``"auto"`` for what the GPU has left.
    activation_memory: int | Literal["auto"] = 0
    # Why the recipe cannot be started in some of `LAYOUTS`.
    obstacles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packed: bool = False  # whether the checkpoint stays packed, which FSDP2 alone splits


def read_inputs(
    name: str, overrides: Sequence[str], gpus: int = 1, smoke: bool = False, prompt_length: int = 512
) -> Inputs:
    """Reads a recipe and builds its model on the meta device, without memory or weights.

    A ``generation_batch_size`` counts all `gpus`; `prompt_length` is for the trainers that generate.
    """
    source = find_recipe(name)
    values, given = check_values(read_recipe(source), overrides, source)
    if smoke:
        values = shrink(values, given)
    if gpus > 1 and (key := next((key for key in ("deepspeed", "fsdp") if values.get(key)), None)) is not None:
        raise RecipeError(
            f"{source}: `{key}` is {values[key]!r}, and `plan` chooses how GPUs share a model; leave it out."
        )
    config, kernels = config_of_values(values, source, packaged=True), kernels_of(values, source)
    _check_experts(values, config, gpus, source)
    check_packed_base(values, config, source)
    fused = bool(values["use_liger_kernel"] and kernels.lora and not values["load_in_8bit"])  # PEFT handles 8 bits
    try:
        every, reduced = _every_n_layers(values), _sync_each_batch(values)
        budget = activation_memory_of(SimpleNamespace(**values)) or 0
        model, dtype = build_on_meta(values, config)
        parameters = count_parameters(
            model,
            _bits(values),
            bool(values["use_bnb_nested_quant"]),
            bool(values["fp8_base"]),
            _packed(values, config),
        )
        if values["optim"] == LIGER_ADAMW:
            liger_adamw_options(SimpleNamespace(**values))
        shape = read_layer_shape(model, fused, bool(values["use_liger_kernel"] and kernels.experts))
        if values["use_liger_kernel"] and kernels.linear_cross_entropy and not TRAINERS[values["trainer"]].scores:
            check_logits_memory(int(kernels.logits_memory), shape.vocab)
    except (ValueError, AttributeError, TypeError) as error:
        raise RecipeError(f"{source}: {first_line(error)}") from error
    split = _split_sequences(values["accelerate_config"])
    has_mixers = any(kind.mixer is not None for kind in shape.kinds)
    notes = _notes(values, config, kernels, prompt_length, split, has_mixers)
    if (rounded := rounded_updates(values, config, dtype, gpus)) is not None:
        notes = (*notes, "{}: {}.".format(*rounded))
    trains_tokens = values["use_liger_kernel"] and kernels.attention and not TRAINERS[values["trainer"]].scores
    if trains_tokens and (counted := shared_layers(model)) is not None:
        notes = (
            *notes,
            "The last {} of {} layers share keys, and have {:.0%} of the products of all layers. In training they run "
            "on the tokens alone whose logits the loss reads; they are planned on all.".format(*counted),
        )
    base = sum(group.bytes for kind, group in parameters.groups.items() if kind != "adapters")
    run = Run(
        parameters,
        shape,
        _work(values, source, base, gpus, prompt_length),
        weight_bytes=dtype.itemsize,
        mixed=_is_mixed(values),
        optim=str(getattr(values["optim"], "value", values["optim"])),
        optim_args=values["optim_args"] or "",
        implementation=_attention(values, kernels, model, split),
        checkpoint_every=every,
        recompute_mlp=bool(values["use_liger_kernel"] and kernels.recompute_mlp),
        fp8=kernels.fp8 if values["use_liger_kernel"] and not values["use_peft"] else None,
        fp8_base=bool(values["fp8_base"]),
        sync_each_batch=reduced,
    )
    packed = stays_packed(values, config)
    against = obstacles(values, config, run, packed)  # what recipes refuse is not proposed
    shared = 0 if "expert parallel" in against else count_experts(config)
    return Inputs(source, values, run, notes, shared, budget, against, packed)


def shared_layers(model: Any) -> tuple[int, int, float] | None:
    """How many of its last layers `model` may run on labelled tokens alone, of how many, and their share of products.

    None for a model without such layers. A token takes a product with each weight of a matrix.
    """
    count = getattr(model.config.get_text_config(), "num_kv_shared_layers", None)
    if not count or not any(hasattr(type(module), METHOD) for module in model.modules()):
        return None
    products = [sum(each.numel() for each in layer.parameters() if each.dim() > 1) for layer in decoder_layers(model)]
    return count, len(products), sum(products[-count:]) / sum(products)


def _check_experts(values: Mapping[str, Any], config: PreTrainedConfig, gpus: int, source: Path) -> None:
    size = values["expert_parallel_size"] or 1
    if size > 1:
        check_expert_count(source, size, config)
    if gpus % size:
        raise RecipeError(
            f"{source}: `expert_parallel_size` is {size}, but `--gpus` is {gpus}; plan for a multiple of {size}, or "
            "with another `--expert_parallel_size` (1 for none)."
        )
    if values["load_in_4bit"]:
        check_loading_in_4_bits(source, values["trainer"], config)


def checkpointing_key(values: Mapping[str, Any]) -> str:
    """The key that switches checkpointing on in this recipe; transformers' newer name wins over the older one."""
    return _newer(values, "activation_checkpointing", "gradient_checkpointing")


def _newer(values: Mapping[str, Any], newer: str, older: str) -> str:
    return older if values.get(newer) is None else newer


def _every_n_layers(values: Mapping[str, Any]) -> int:
    """With checkpointing, one decoder layer out of this many is checkpointed."""
    key = _newer(values, "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    every = (mapping(key, values[key]) or {}).get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError(f"`{key}` has `every_n_layers: {every!r}`; it must be an integer, 1 or more.")
    return every


def _sync_each_batch(values: Mapping[str, Any]) -> bool:
    """Whether gradients are reduced after every micro-batch, by the key of this name in `accelerator_config`."""
    config = values["accelerator_config"]
    if isinstance(config, str) and not config.lstrip().startswith("{"):
        try:
            config = Path(config).read_text()
        except OSError as error:
            raise ValueError(f"`accelerator_config` is {config!r}, which cannot be read: {error}") from error
    config = mapping("accelerator_config", config) or {}
    return bool((config.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", False))


def build_on_meta(values: Mapping[str, Any], config: PreTrainedConfig) -> tuple[Any, Any]:
    """The model on the meta device, with adapters if the recipe has any, and the dtype of its weights."""
    from trl import ModelConfig, get_peft_config

    dtype = values["dtype"]
    if dtype in (None, "auto"):
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        dtype = stored if isinstance(stored, torch.dtype) and values["model_name_or_path"] else torch.float32
    else:
        dtype = getattr(torch, dtype)
    scored = TRAINERS[values["trainer"]].scores
    if scored:
        from transformers import AutoModelForSequenceClassification

        kind: Any = AutoModelForSequenceClassification
        config.num_labels = 1
    else:
        kind = model_class(config)
    fields = {field.name: values[field.name] for field in dataclasses.fields(ModelConfig) if field.init}
    adapters = ModelConfig(**{**fields, **({"lora_task_type": "SEQ_CLS"} if scored else {})})
    adapters.lora_target_modules = target_modules(adapters.lora_target_modules)
    lora = get_peft_config(adapters)
    trusted = bool(values.get("trust_remote_code"))
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, trust_remote_code=trusted)
        if lora is not None:
            from peft import get_peft_model

            model = get_peft_model(model, lora)
            if _bits(values) and values["trainer"] != "causal_lm":  # TRL casts adapters on a quantised base
                for parameter in model.parameters():
                    parameter.data = parameter.to(torch.bfloat16) if parameter.requires_grad else parameter.data
    return model, dtype


def _split_sequences(launch: str | None) -> str:
    """Why a launch with this accelerate configuration leaves attention as it is; empty if it does not."""
    if not launch:
        return ""
    config = yaml.safe_load(accelerate_config(launch).read_text(encoding="utf-8")) or {}
    sizes = config.get("parallelism_config") or {}
    return reason_of_sizes(sizes.get("parallelism_config_cp_size", 1), sizes.get("parallelism_config_sp_size", 1))


def _is_mixed(values: Mapping[str, Any]) -> bool:
    return bool(values["bf16"] or values["fp16"] or values["bf16"] is None)  # TRL's own default is bf16


def _packed(values: Mapping[str, Any], config: PreTrainedConfig) -> Callable[[str, bool], float | None] | None:
    """What says the bytes of a weight, where the checkpoint stays packed."""
    if not stays_packed(values, config):
        return None
    settings = quantization_of(config)
    return bytes_of_weights(settings if isinstance(settings, dict) else settings.to_dict())


def stays_packed(values: Mapping[str, Any], config: PreTrainedConfig) -> bool:
    """Whether a run of the recipe on one GPU, under DDP or FSDP2, keeps the checkpoint packed."""
    adapted = bool(values["use_peft"]) and _bits(values) is None
    return method_of(config) is not None and keeps_packed(SimpleNamespace(**values), adapted)


def _bits(values: Mapping[str, Any]) -> int | None:
    return 4 if values["load_in_4bit"] else 8 if values["load_in_8bit"] else None


def _attention(values: Mapping[str, Any], kernels: KernelConfig, model: Any, split: str) -> str:
    """The attention that the model will run: ours in the place of transformers' default, if it is on and proved."""
    default, asked = named_attention(model), values["attn_implementation"]
    written = default if asked in (None, "auto") else str(asked)
    if split or written != default or not (values["use_liger_kernel"] and kernels.attention):
        return written
    probe = Probe(torch.device("cpu"))
    with probe.isolated():
        return NAME if any(finding.kernel for finding in find_attention(model, True, probe)) else written


def kernels_of(values: Mapping[str, Any], source: Path) -> KernelConfig:
    """The recipe's `liger_kernel_config`, checked."""
    try:
        return kernel_config_of(SimpleNamespace(**values))
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from error


def _work(values: Mapping[str, Any], source: Path, base_bytes: float, gpus: int, prompt_length: int) -> Work:
    trainer = TRAINERS[values["trainer"]]
    head = HeadSettings.of(SimpleNamespace(**values), trainer.loss)
    reference = base_bytes if _has_reference(values) else 0.0
    if trainer.generates:
        answer = values["max_completion_length"] or 0
        length = answer + prompt_length
        return Work(1, length, answer, head, reference, **_generation(values, gpus), scored=_scored(values, gpus))
    length = values["max_length"]
    if not length:
        raise RecipeError(
            f"{source}: `max_length` is not set, so the longest sequence is not known; plan with `--max_length N`."
        )
    return Work(2 if trainer.pairs else 1, length, length, head, reference, scored=_scored(values, gpus))


def _scored(values: Mapping[str, Any], gpus: int) -> float:
    """Forwards without gradients beside each one with them, as TRL's trainers make them."""
    kind = TRAINERS[values["trainer"]]
    if not kind.generates:
        reference = int(kind.has_reference and not values["precompute_ref_log_probs"])
        mismatched = int(values["trainer"] == "kto" and values["loss_type"] == "kto")
        return reference + mismatched * (1 + reference)
    accumulation, repeats = values["gradient_accumulation_steps"], values["num_iterations"]
    each = values["per_device_train_batch_size"] * gpus
    drawn = (values["generation_batch_size"] or 0) // each or values["steps_per_generation"] or accumulation
    old = values["trainer"] == "rloo" or accumulation % (drawn * repeats) > 0
    old = old or bool(values["use_vllm"] and values["vllm_importance_sampling_correction"])
    return (old + (values["beta"] != 0)) / repeats


def _has_reference(values: Mapping[str, Any]) -> bool:
    """Whether a second model is in memory; with adapters, the policy without them is the reference."""
    if values["use_peft"]:
        return False
    kind = TRAINERS[values["trainer"]]
    if kind.generates:
        return values["beta"] != 0
    return kind.has_reference and not values["precompute_ref_log_probs"]


def _generation(values: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    if values.get("use_vllm"):
        here = values.get("vllm_mode") == "colocate" and not values.get("vllm_enable_sleep_mode")
        return {"reserved_fraction": values["vllm_gpu_memory_utilization"] if here else 0.0}
    if values["generation_batch_size"]:
        each = values["per_device_train_batch_size"] * gpus
        return {"generated": max(values["generation_batch_size"] // each, 1), "all_micro_batches": False}
    steps = values["steps_per_generation"]
    return {"generated": steps or 1, "all_micro_batches": not steps}


def _notes(
    values: Mapping[str, Any],
    config: PreTrainedConfig,
    kernels: KernelConfig,
    prompt_length: int,
    split: str,
    has_mixers: bool,
) -> tuple[str, ...]:
    notes = []
    if split:
        notes.append(f"Sequences are planned whole, although {split}.")
    name = values["model_name_or_path"]
    if name is not None and published_config(name, values["model_revision"]) is not None:
        notes.append(f"The sizes of {name} are those packaged with liger_trainer; the Hub was not asked.")
    if TRAINERS[values["trainer"]].generates:
        notes.append(
            f"Prompts are assumed to have {prompt_length} tokens (`--prompt_length`); generating is not in the time."
        )
    if values.get("tokens_per_micro_batch"):
        notes.append("`tokens_per_micro_batch` is not counted: a batch is planned as one forward, padded.")
    if not values["use_liger_kernel"]:
        notes.append("`use_liger_kernel` is false: layers without the kernels take more memory and time than planned.")
    if config.get_text_config() is not config:
        notes.append("Activations of images are not counted.")
    kinds = sorted({kind for kind in getattr(config.get_text_config(), "layer_types", None) or () if "linear" in kind})
    if kinds and not has_mixers:
        notes.append(f"Layers of the type {', '.join(kinds)} are planned as if they had attention.")
    if (every := _every_n_layers(values)) > 1:
        meaning = f"checkpoints one of every {every} layers; the others save their activations."
        notes.append(f'With `every_n_layers`, "checkpointing" {meaning}')
    if values["warm_start"]:
        notes.append("The warm start is a separate run and is not planned.")
    optim = str(getattr(values["optim"], "value", values["optim"]))
    if optim == LIGER_ADAMW and _is_mixed(values) and not values["use_peft"]:
        notes.append(
            "Under FSDP2 accelerate makes the weights fp32 where `bf16` is true; with `bf16: false` they stay."
        )
    if not is_known(optim):
        notes.append(f"`optim: {optim}` is assumed to keep 8 bytes for each trained element.")
    return tuple(notes)


def rounded_updates(
    values: Mapping[str, Any], config: PreTrainedConfig, dtype: torch.dtype, gpus: int
) -> tuple[str, str] | None:
    """What rounding would lose of Adam's updates, as `RoundedUpdatesCallback` finds in training, and what to do.

    None if most weights can change. FSDP and DeepSpeed split, and may keep fp32 weights, only on several `gpus`.
    """
    optim = str(getattr(values["optim"], "value", values["optim"]))
    rate, std = values["learning_rate"], getattr(config.get_text_config(), "initializer_range", None)
    if optim.removeprefix("paged_") not in _ADAMS or values["use_peft"] or dtype.itemsize > 2 or not rate or not std:
        return None
    launch = accelerate_config(values["accelerate_config"]) if values["accelerate_config"] and gpus > 1 else None
    kind = (yaml.safe_load(launch.read_text(encoding="utf-8")) or {}).get("distributed_type") if launch else None
    share = expected_share(rate, std, dtype)
    if share >= LEAST_SHARE or kind == "DEEPSPEED" or (kind == "FSDP" and _is_mixed(values)):
        return None
    name, ours = str(dtype).removeprefix("torch."), "set `optim: liger_adamw`, or " if dtype == torch.bfloat16 else ""
    return (
        f"`optim: {optim}` at `learning_rate: {rate:g}` changes at most {100 * share:.1f} % of weights in {name}, the "
        "updates of the others are rounded away",
        f"{ours}train fp32 weights with `bf16: true` and `dtype: float32`, FSDP2 or ZeRO",
    )
