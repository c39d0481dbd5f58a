"""Matmuls in fp8 that cannot run, or that save no time; training says the first in a report, and not the second."""

from __future__ import annotations

from collections import Counter

import torch

from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.patching.fp8 import ADAPTED, ENDS, LEAST_ROWS, find_fp8
from liger_trainer.recipe.experts import count_experts
from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.trap import Trap
from liger_trainer.tools.planning.inputs import kernels_of

_LEAVE_OUT = "`fp8: null`"
_NO_LAYER = "`fp8` is set, but no layer multiplies in it"


def idle_fp8(case: Case) -> list[Trap]:
    """`fp8` without a layer, a dtype or a GPU for it, with too few tokens, or for a mixture of experts."""
    if kernels_of(case.values, case.source).fp8 is None:
        return []
    if not case.values["use_liger_kernel"]:
        return [Trap("`fp8` is set, but `use_liger_kernel: false` leaves every layer in bf16", _LEAVE_OUT)]
    return [*_of_gpu(), *_of_dtype(case), *_of_layers(case), *_of_tokens(case)]


def _of_gpu() -> list[Trap]:
    if not torch.cuda.is_available() or has_fp8(torch.device("cuda", 0)):
        return []
    what = f"`fp8` is set, but {torch.cuda.get_device_name(0)} is no NVIDIA Hopper or newer: every layer stays in bf16"
    return [Trap(what, f"{_LEAVE_OUT}, or another GPU")]


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
