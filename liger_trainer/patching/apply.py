"""Applying the kernels to a model, and reverting them."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import installed_version
from liger_trainer.configs.kernel_config import KERNEL_KEYS, KernelConfig
from liger_trainer.head.forward import make_head_forward
from liger_trainer.head.lm_head import find_lm_heads, without_adapters
from liger_trainer.kernels.compile_together import compiler_for
from liger_trainer.kernels.lora.nf4 import free_buffers
from liger_trainer.patching.binding import bound_modules, unbind_forward
from liger_trainer.patching.codes import unscaled_weights
from liger_trainer.patching.fp8 import cast_in_norms, find_fp8
from liger_trainer.patching.head import patch_head, probe_head
from liger_trainer.patching.latent import find_latent, rotate_whole_queries
from liger_trainer.patching.lora.attention import share_inputs
from liger_trainer.patching.lora.guards import refuse_what_reads_weights
from liger_trainer.patching.lora.layers import find_litgpt_lora, find_lora
from liger_trainer.patching.mlps import find_gated_mlp, find_relu_squared_mlp
from liger_trainer.patching.moe.expert_parallel import find_expert_exchange
from liger_trainer.patching.moe.experts import find_experts
from liger_trainer.patching.moe.load_balancing import find_load_balancing_loss
from liger_trainer.patching.moe.lora_experts import find_adapted_parameter
from liger_trainer.patching.moe.routers import find_router
from liger_trainer.patching.moe.scaled_experts import find_scaled_experts
from liger_trainer.patching.norms import find_norm
from liger_trainer.patching.probe import Probe
from liger_trainer.patching.report import MIXERS, Choice, Finding, KernelReport, KernelReportRow, rows, unserved
from liger_trainer.patching.rope import find_rope, fuse_qk_norms
from liger_trainer.patching.trial import KernelRuns
from liger_trainer.patching.use_kernels import forget

_META_REMARK = (
    "The model has parameters on the meta device: the kernels are in place, but it cannot run before its weights are "
    "loaded (from_pretrained, or model.to_empty and a state dict)."
)


def apply_liger_kernel(
    model: nn.Module, config: KernelConfig | Mapping[str, Any] | str | None = None, strict: bool = False
) -> KernelReport:
    """Applies the kernels to `model`, in place, wherever they are proved to compute what the model computes.

    Candidates are found by structure, so any model will do: plain, multimodal, wrapped by PEFT or built by TRL, on any
    device or on the meta device. The forward of each candidate and ours run on small dummy modules, never on the
    model's weights. Where values and gradients agree, our forward is bound to the instance; everything else is left
    alone. Classes, torch functions and child modules do not change. Applying again replaces what was applied before.

    Args:
        model: The model.
        config: Which kernels: a [`KernelConfig`], a mapping such as ``{"rope": False}``, the same as a JSON string,
            or None for all of them.
        strict: Raise if a kernel cannot be applied that `config` explicitly sets to true, or that the model has a
            component for.

    Returns:
        The report: a row for every kind of candidate, with its probe error or why it was left alone.

    Raises:
        TypeError: if `model` is not an `nn.Module`.
        ValueError: for an unknown key or a wrong value in `config`; for `nn.DataParallel`; and with `strict` if
            something asked for cannot be applied. The model is then left without kernels.
    """
    return apply_kernels(model, config, strict)


def apply_kernels(
    model: nn.Module,
    config: KernelConfig | Mapping[str, Any] | str | None = None,
    strict: bool = False,
    gathers: bool = False,
) -> KernelReport:
    """As [`apply_liger_kernel`].

    With `gathers`, the caller gives forwards parts of sequences, with plans that gather their keys: see
    [`find_attention`][liger_trainer.patching.attention.find_attention].
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` is a {type(model).__name__}; apply_liger_kernel needs a torch.nn.Module.")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ValueError(
            "`model` is wrapped in nn.DataParallel, whose replicas would share the forwards of one device. Give the "
            "model itself, and train on several devices with DistributedDataParallel (`accelerate launch`, `torchrun`)."
        )
    start = time.perf_counter()
    parsed = KernelConfig.parse(config)
    revert_liger_kernel(model)
    refuse_what_reads_weights(model)

    findings = _find_proved(model, parsed, gathers)
    report_rows, without_kernel = rows(findings), unserved(model, findings)
    for finding in findings:
        if finding.forward is not None:
            finding.bind(finding.module, finding.forward)
    if ours := [each.module for each in findings if each.component in MIXERS and each.forward is not None]:
        from liger_trainer.patching.recurrent.documents import carry_documents

        carry_documents(model, ours)
    try:
        if parsed.linear_cross_entropy or parsed.cross_entropy:
            assert isinstance(parsed.logits_memory, int)  # KernelConfig makes it one
            head = patch_head(model, fused=parsed.linear_cross_entropy, logits_memory=parsed.logits_memory)
            report_rows.append(head)
        report_rows += without_kernel
        if strict:
            _check_strict(report_rows, _explicit_keys(config))
    except BaseException:
        revert_liger_kernel(model)
        raise
    weakref.finalize(model, free_buffers).atexit = False
    remarks = [_META_REMARK] if any(parameter.is_meta for parameter in model.parameters()) else []
    unscaled = unscaled_weights(model)
    if unscaled:
        remarks.append(
            f"{len(unscaled)} weights, such as {unscaled[0]!r}, hold the codes of a quantised checkpoint, whose scales "
            "were not loaded: the model computes something else than it was trained to. A trainer refuses it."
        )
    return KernelReport(_model_name(model), tuple(report_rows), tuple(remarks), time.perf_counter() - start)


def revert_liger_kernel(model: nn.Module) -> int:
    """Takes the kernels out of `model`: every instance with a forward of ours gets its own forward back.

    The memory into which weights in 4 bits are dequantised (one buffer for each device and dtype, as large as the
    largest weight) is freed too, as it is when a model is garbage-collected.

    Returns:
        How many instances were reverted.
    """
    free_buffers()
    forget(model)
    if _has_parts_of_transformers(model):
        from liger_trainer.patching.attention import restore_attention

        restore_attention(model)
    return sum(unbind_forward(module) for module in list(bound_modules(model)))


def _find_proved(model: nn.Module, config: KernelConfig, gathers: bool) -> list[Finding]:
    """All findings. Kernels run after all formulas are proved; where one is wrong, each runs in its own proof instead.

    The second way takes longer, but tells which kernel it is, and tries other formulas in its place.
    """
    device = _probe_device(model)
    with compiler_for(device) as compiler:
        runs = KernelRuns(compiler)
        probe = Probe(device, runs.later)
        if compiler is not None and (config.linear_cross_entropy or config.cross_entropy):
            with compiler.noting(), contextlib.suppress(Exception):  # the head is proved last
                forward = make_head_forward(config.linear_cross_entropy, int(config.logits_memory))
                probe_head(forward, False, device)
        with probe.isolated():
            findings = _find_everything(model, config, probe, gathers)
            if runs.are_right():
                return findings
    probe = Probe(device)
    with probe.isolated():
        return _find_everything(model, config, probe, gathers)


def _find_everything(model: nn.Module, config: KernelConfig, probe: Probe, gathers: bool) -> list[Finding]:
    findings = rotate_whole_queries(fuse_qk_norms(_find_all(model, config, probe), probe), probe)
    findings = share_inputs(findings, model, probe)
    if _has_parts_of_transformers(model):
        from liger_trainer.patching.attention import find_attention

        mixers = [each.module for each in findings if each.component in MIXERS]
        findings += find_attention(model, config.attention, probe, mixers, gathers)
    findings += find_fp8(model, config.fp8, config.fp8_all_layers, probe.device)
    return cast_in_norms(findings, model, config.fp8, probe)


def _find_all(model: nn.Module, config: KernelConfig, probe: Probe) -> Iterator[Finding]:
    def enabled(component: str) -> bool:
        return getattr(config, component)

    heads, _ = find_lm_heads(without_adapters(model))  # the fused head takes care of an adapter on one
    find_mixer = _finder_of_mixers()
    for module in model.modules():
        if any(module is head for head in heads):
            continue
        if (exchange := find_expert_exchange(module, enabled)) is not None:
            yield exchange
        finding = (
            find_lora(module, enabled, probe)
            or find_litgpt_lora(module, enabled, probe)
            or find_adapted_parameter(module, enabled, probe)
            or find_mixer(module, enabled, probe)
            or find_norm(module, enabled, probe)
            or find_gated_mlp(module, enabled, probe)
            or find_relu_squared_mlp(module, enabled, probe)
            or find_router(module, enabled, probe)
            or find_experts(module, enabled, probe)
        )
        if finding is not None:
            yield finding
        else:
            yield from find_scaled_experts(module, enabled, probe)
            yield from find_rope(module, enabled, probe)
            yield from find_latent(module, enabled, probe)
            yield from find_load_balancing_loss(module, config, probe)


def _finder_of_mixers() -> Callable[[nn.Module, Callable[[str], bool], Probe], Finding | None]:
    """What finds layers that mix tokens without attention. Without transformers it is not there, nor are they."""
    if installed_version("transformers") is None:
        return lambda module, enabled, probe: None
    from liger_trainer.patching.recurrent.find import find_mixer

    return find_mixer


def _has_parts_of_transformers(model: nn.Module) -> bool:
    """Whether a class of transformers is in `model`; a model of plain torch needs no transformers installed."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    return any(cls.__module__.partition(".")[0] == "transformers" for cls in classes)


def _probe_device(model: nn.Module) -> torch.device:
    """The accelerator that holds parameters of the model; otherwise the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for parameter in model.parameters():
        if accelerator is not None and parameter.device.type == accelerator.type:
            return parameter.device
    return torch.device("cpu")


def _model_name(model: nn.Module) -> str:
    base = without_adapters(model)
    return type(base).__name__ if base is model else f"{type(base).__name__} in {type(model).__name__}"


def _explicit_keys(config: KernelConfig | Mapping[str, Any] | str | None) -> set[str]:
    """The keys that the user, in a valid `config`, has explicitly set to true."""
    given = json.loads(config) if isinstance(config, str) else config
    if not isinstance(given, Mapping):
        return set()
    aliases = {"fused_linear_cross_entropy": "linear_cross_entropy"}
    return {aliases.get(key, key) for key, value in given.items() if value is True} & set(KERNEL_KEYS)


def _check_strict(report_rows: list[KernelReportRow], explicit: set[str]) -> None:
    applied = {row.component for row in report_rows if row.applied}
    if "linear_cross_entropy" in applied:
        applied.add("cross_entropy")  # it is part of the fused head
    problems = [
        f"{row.component}: {row.count} x {row.target} left alone, {row.reason}"
        for row in report_rows
        if not row.applied
        and row.count
        and not isinstance(row.reason, Choice)
        and row.share is None  # else no kernel is for it
        and not (row.component == "fp8" and "fp8" in applied)  # which suits only some layers
    ]
    named = {problem.split(":")[0] for problem in problems}
    problems += [f"{key}: the model has nothing of the kind" for key in sorted(explicit - applied - named)]
    if problems:
        raise ValueError(
            f"`strict` is set, but these kernels cannot be applied: {'; '.join(problems)}. Switch them off in "
            "`liger_kernel_config`, or `strict` (in training arguments `strict_kernels`)."
        )
