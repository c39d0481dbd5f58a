"""Checks of the keys of a recipe and of the configuration of its model.

The checks are of half-precision weights that lose updates, adapters on tied weights, names that PEFT takes for experts,
checkpoints in 8 bits and fewer, sampling from another distribution than the loss takes, rows longer than the model has
positions, checkpoints that lose gradients of shared keys, and fp8 that cannot run or saves no time.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from liger_trainer.head.lm_head import adapts_tied_weight
from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.packed.loading import method_of, quantization_of
from liger_trainer.patching.fp8 import ADAPTED, ENDS, LEAST_ROWS, find_fp8
from liger_trainer.recipe.checks import target_modules
from liger_trainer.recipe.experts import count_experts
from liger_trainer.recipe.model import positions_of
from liger_trainer.recipe.schema import mapping
from liger_trainer.tools.diagnosis.sample import Case, Trap
from liger_trainer.tools.planning.inputs import kernels_of, rounded_updates
from liger_trainer.trainers.checks.shared_keys import loses_shared_gradients
from liger_trainer.trainers.checks.trl_arguments import truncated_sampling


def rounded(case: Case) -> list[Trap]:
    """Asks the estimate of ``liger-trainer plan``; an `accelerate_config` is taken to be launched on several GPUs."""
    _, dtype = case.model_and_dtype
    found = rounded_updates(case.values, case.config, dtype, gpus=2)
    return [] if found is None else [Trap(f"{found[0]}, while the loss looks healthy", found[1])]


def tied_adapters(case: Case) -> list[Trap]:
    """LoRA on the head or the embedding of a model that ties the two, or a copy of one of them in `modules_to_save`."""
    if not case.values["use_peft"]:
        return []
    model, _ = case.model_and_dtype
    found = []
    if adapts_tied_weight(model):
        found.append(
            Trap(
                "Embedding and head share a weight, and `lora_target_modules` puts an adapter on one of them: "
                "`merge_and_unload()` adds it to both, so the merged model computes other logits than the trained one",
                'leave it out, with `lora_target_modules: "all-linear"`, or untie the head before you merge',
            )
        )
    if _saves_one_of_two(case, model):
        found.append(
            Trap(
                "Embedding and head share a weight, and `lora_modules_to_save` trains a copy of one of them alone: the "
                "other keeps the old values, and the merged model is larger by that weight",
                "`lora_modules_to_save: null`, or in a script `LoraConfig(..., ensure_weight_tying=True)`",
            )
        )
    return found


def _saves_one_of_two(case: Case, model: Any) -> bool:
    if not getattr(case.config.get_text_config(), "tie_word_embeddings", False) or "peft" not in sys.modules:
        return False
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    ends = [base.get_output_embeddings(), base.get_input_embeddings()]
    return sum(isinstance(end, ModulesToSaveWrapper) for end in ends) == 1


def taken_for_experts(case: Case) -> list[Trap]:
    """Linear layers that get no adapter, because PEFT takes their names for those of stacked experts.

    Checkpoints name the linear layers of single experts. Where transformers stacks these, PEFT puts adapters on the
    stacks instead, and on nothing else of these names: neither shared experts nor the MLPs of dense layers.
    """
    asked = case.values["lora_target_modules"]
    if not asked or not case.values["use_peft"]:
        return []
    asked = target_modules(asked[0] if isinstance(asked, list) and len(asked) == 1 else asked)
    model, _ = case.model_and_dtype
    (config,) = model.peft_config.values()
    if not {*(config.target_parameters or ())} - {*(case.values["lora_target_parameters"] or ())}:
        return []
    base = model.get_base_model()
    lost = {
        path.rpartition(".")[2]
        for path, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not base.get_output_embeddings() and _names(asked, path)
    }
    if not lost:
        return []
    return [
        Trap(
            f"PEFT takes {', '.join(sorted(lost))} of `lora_target_modules` for the stacked experts. Other linear "
            "layers of these names, as in shared experts and dense layers, get no adapter, while the loss looks "
            "healthy; the adapters on gate and up have twice `lora_r`",
            "name the attention's layers alone, and the experts in `lora_target_parameters`, as the recipe "
            "glm_4_7_flash_fp8_sft_lora does",
        )
    ]


def _names(asked: Any, path: str) -> bool:
    """Whether `lora_target_modules` names the module at `path`, which is not one of an adapter's own."""
    if {"base_layer", "lora_A", "lora_B", "experts"} & {*path.split(".")}:
        return False
    if isinstance(asked, str):
        return asked.lower() == "all-linear" or re.fullmatch(asked, path) is not None
    return any(f".{path}".endswith(f".{name}") for name in asked)


_IN_16_BITS = "`model_name_or_path:` the same model in 16 bits"


def low_bit_base(case: Case) -> list[Trap]:
    """A format that transformers does not know, quantised activations, and adapters on weights that stay codes.

    None of them is one where the base stays packed, since its products are ours.
    """
    settings = quantization_of(case.config)
    if settings is None or _stays_packed(case):
        return []
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = settings.get("quant_method")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(str(getattr(method, "value", method)))
    if kind is None and not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        what = f"transformers does not know the checkpoint's `quant_method` {method!r}"
        return [Trap(f"{what}: it loads the codes as weights, without their scales", _IN_16_BITS)]
    found = []
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    if any(group.get("input_activations") is not None for group in groups):
        found.append(
            Trap(
                "The checkpoint's linear layers quantise their inputs as well, and pass no gradient to the layers "
                "below them: adapters there train on wrong gradients, or not at all",
                f"{_IN_16_BITS}, or in a script `quantization_config={_name_of(kind)}(dequantize=True)`",
            )
        )
    targets = case.values["use_peft"] and case.values.get("lora_target_parameters")
    if method_of(case.config) == "mxfp4" and not case.is_model:
        targets = None  # a recipe loads these in 16 bits
    if targets and "dequantize" in _parameters_of(kind):
        found.append(
            Trap(
                f"`lora_target_parameters` is {targets}, and the checkpoint is quantised ({method}): where its codes "
                "stay packed, as on a GPU, PEFT adds these adapters to the codes or makes none",
                f"`lora_target_parameters: null`, {_IN_16_BITS}, or in a script "
                f"`quantization_config={_name_of(kind)}(dequantize=True)`",
            )
        )
    return found


def _stays_packed(case: Case) -> bool:
    known = method_of(case.config) is not None and not case.is_model
    return known and bool(case.values["use_peft"]) and case.values["packed_base"] not in (False, "false")


def _parameters_of(kind: Any) -> tuple[str, ...]:
    code = getattr(getattr(kind, "__init__", None), "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def _name_of(kind: Any) -> str:
    return getattr(kind, "__name__", "...Config")


def sampling(case: Case) -> list[Trap]:
    """Truncation against importance ratios over the whole vocabulary, and a temperature that the loss does not know."""
    if not case.kind.generates:
        return []
    options = mapping("generation_kwargs", case.values["generation_kwargs"]) or {}
    found = truncated_sampling(SimpleNamespace(**{**case.values, "generation_kwargs": options}))
    traps = [] if found is None else [Trap(*found)]
    own, given = case.values["temperature"], options.get("temperature")
    if given is not None and given != own:
        what = f"`generation_kwargs` samples at `temperature` {given}, but the loss divides the logits by {own}"
        traps.append(Trap(f"{what}: it takes probabilities of another policy", f"`temperature: {given}`"))
    return traps


def too_long(case: Case) -> list[Trap]:
    """Rows, or answers alone, that may have more tokens than the model has positions."""
    most = positions_of(case.config)
    key = "max_completion_length" if case.kind.generates else "max_length"
    length = case.values[key]
    if not most or not length or length + case.kind.generates <= most:  # a prompt has a token at least
        return []
    return [Trap(f"`{key}: {length}`, but {beyond(case, most)}", f"`{key}: {most // (1 + case.kind.generates)}`")]


def beyond(case: Case, most: int) -> str:
    """What is wrong with tokens behind the `most` positions of the model."""
    return (
        f"{case.config.model_type} has {most} positions: those behind were never trained, and a learnt embedding does "
        "not have them"
    )


def reentrant_checkpoints(case: Case) -> list[Trap]:
    """Checkpoints that run a layer without a graph first, from which later layers have their keys."""
    given = mapping("gradient_checkpointing_kwargs", case.values["gradient_checkpointing_kwargs"])
    if not case.values["gradient_checkpointing"] or not loses_shared_gradients(case.config, given):
        return []
    what = (
        f"`use_reentrant: true` in `gradient_checkpointing_kwargs`: layers of {case.config.model_type} have the keys "
        "of earlier ones, and no gradient goes back through these, while the loss looks healthy"
    )
    return [Trap(what, "`gradient_checkpointing_kwargs: {use_reentrant: false}`")]


def unshared_prompts(case: Case) -> list[Trap]:
    """Dropout of adapters, with which the prompts of a batch are computed for every answer again."""
    values = case.values
    shares = values["use_liger_kernel"] and values.get("share_prompt", False) is not False  # None: by default
    if not shares or not values["use_peft"] or not values["lora_dropout"]:
        return []
    what = (
        f"`lora_dropout: {values['lora_dropout']}` switches `share_prompt` off: a prompt is computed again for each of "
        "its answers, which can take twice the time"
    )
    return [Trap(what, "`lora_dropout: 0.0`")]


_LEAVE_OUT = "`fp8: null`"
_NO_LAYER = "`fp8` is set, but no layer multiplies in it"


def idle_fp8(case: Case) -> list[Trap]:
    """`fp8` without a layer, a dtype or a GPU for it, with too few tokens, or for a mixture of experts."""
    if kernels_of(case.values, case.source).fp8 is None:
        return []
    if not case.values["use_liger_kernel"]:
        return [Trap("`fp8` is set, but `use_liger_kernel: false` leaves every layer in bf16", _LEAVE_OUT)]
    found = []
    if torch.cuda.is_available() and not has_fp8(torch.device("cuda", 0)):
        name = torch.cuda.get_device_name(0)
        what = f"`fp8` is set, but {name} is no NVIDIA Hopper or newer: every layer stays in bf16"
        found = [Trap(what, f"{_LEAVE_OUT}, or another GPU")]
    return [*found, *_of_dtype(case), *_of_layers(case), *_of_tokens(case)]


def _of_dtype(case: Case) -> list[Trap]:
    _, dtype = case.model_and_dtype
    if case.values["fp16"]:
        return [Trap("`fp8` is set, but `fp16: true` has the layers multiply in fp16", "`bf16: true`, `fp16: false`")]
    if case.values["bf16"] is False and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return [Trap(f"`fp8` is set, but the layers multiply in {name}, as without it", "`bf16: true`")]
    return []


def _of_layers(case: Case) -> list[Trap]:
    kernels = kernels_of(case.values, case.source)
    _, applied = _layers(case, kernels.fp8_all_layers)
    if applied and count_experts(case.config):
        what = "`fp8` is set, but experts stay in bf16, and most of a mixture of experts' time is theirs"
        return [Trap(what, f"{_LEAVE_OUT}, unless you have measured that it is faster")]
    if applied:
        return []
    reasons, applied = _layers(case, True)
    if applied:
        return [Trap(f"{_NO_LAYER}: {ENDS}", '`liger_kernel_config: {"fp8_all_layers": true}`')]
    if ADAPTED in reasons:
        return [] if case.values["fp8_base"] else [Trap(f"{_NO_LAYER}: {ADAPTED}", "`fp8_base: true`")]
    return [Trap(f"{_NO_LAYER}: {reasons[0] if reasons else 'it has no linear layers'}", _LEAVE_OUT)]


def _layers(case: Case, all_layers: bool) -> tuple[list[str], bool]:
    """Why layers stay in bf16, the most frequent reason first, and whether any does not; on whatever GPU."""
    model, _ = case.model_and_dtype
    mode = kernels_of(case.values, case.source).fp8
    findings = list(find_fp8(model, mode, all_layers, torch.device("cpu")))
    reasons = Counter(finding.reason for finding in findings if finding.forward is None)
    return [reason for reason, _ in reasons.most_common()], any(finding.forward is not None for finding in findings)


def _of_tokens(case: Case) -> list[Trap]:
    """Of a micro-batch, at most; how long the answers of a policy are is not known."""
    values = case.values
    if case.kind.generates or not values["max_length"]:
        return []
    rows = values["per_device_train_batch_size"] * (2 if case.kind.pairs else 1)
    tokens, most = rows * values["max_length"], values.get("tokens_per_micro_batch")
    fix = "a larger `per_device_train_batch_size`, with fewer `gradient_accumulation_steps`, or a larger `max_length`"
    if most and most < tokens:
        tokens, fix = most, f"`tokens_per_micro_batch: {LEAST_ROWS}`, or more"
    if tokens >= LEAST_ROWS:
        return []
    return [
        Trap(
            f"`fp8` is set, but a micro-batch has at most {tokens:,} tokens, and layers multiply fewer than "
            f"{LEAST_ROWS:,} in bf16, as casting the weights would take longer than it saves",
            fix,
        )
    ]
