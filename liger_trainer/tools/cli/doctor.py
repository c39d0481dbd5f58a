"""``liger-trainer doctor``: versions, devices, what is accelerated here and what is not, and the known traps."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import platform
import sys
import tomllib
from pathlib import Path
from typing import Literal

from liger_trainer.compat.private import TESTED, available, installed_version, is_at_least, is_newer_than_tested
from liger_trainer.compat.transformers import LEAST_PEFT


@functools.cache
def requirements() -> dict[str, str]:
    """The supported version range of each library that the trainers need here, such as ``{"trl": "<2,>=1.16"}``.

    The ranges come from the installed distribution or, in a plain checkout, from pyproject.toml.
    """
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("liger-trainer") or []
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        lines = project["dependencies"] + project["optional-dependencies"]["train"]
    needed = [Requirement(line) for line in lines]
    needed = [item for item in needed if item.marker is None or item.marker.evaluate({"extra": "train"})]
    return {item.name: str(item.specifier) for item in needed}


Status = Literal["ok", "note", "warning", "error"]
_MARKS = {"ok": "[green]ok[/green]", "note": "note", "warning": "[yellow]warning[/yellow]", "error": "[red]error[/red]"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    subject: str
    status: Status
    text: str


def doctor() -> int:
    """Prints every finding as a table; returns 1 where something keeps the package from working, else 0."""
    from rich.console import Console
    from rich.table import Table

    findings = [*versions(), *devices(), *private_names(), *traps()]
    table = Table(title="liger-trainer doctor", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, _MARKS[finding.status], finding.text)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    return int(any(finding.status == "error" for finding in findings))


def versions() -> list[Finding]:
    """Python and every dependency, with the range that is supported."""
    from packaging.specifiers import SpecifierSet

    from liger_trainer._version import __version__

    findings = [Finding("liger-trainer", "ok", __version__)]
    python = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    findings.append(Finding("python", "ok" if fits else "warning", f"{python} (tested 3.11 to 3.13)"))
    for package, wanted in requirements().items():
        found = installed_version(package)
        text = f"{found or 'not installed'} (supported {wanted})"
        if found is None or not SpecifierSet(wanted).contains(found.split("+")[0], prereleases=True):
            findings.append(Finding(package, "error", f"{text}: pip install '{package}{wanted}'"))
        elif is_newer_than_tested(package):
            findings.append(Finding(package, "note", f"{text}: newer than what was tested ({TESTED[package]})"))
        else:
            findings.append(Finding(package, "ok", text))
    return findings


def unmet_requirement() -> str | None:
    """The first dependency that is missing or out of range; without triton, the plain torch reference path runs."""
    wrong = (f"{item.subject}: {item.text}" for item in versions() if item.status == "error")
    return next((line for line in wrong if not line.startswith("triton:")), None)


def devices() -> list[Finding]:
    """Each accelerator, and whether the Triton kernels run there."""
    import torch

    from liger_trainer.kernels.runtime import HAS_TRITON, INTERPRETED

    if not torch.accelerator.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else ""
        why = why or "torch finds no working driver; see `nvidia-smi`"
        findings = [Finding("device", "note", f"CPU only ({why}): everything runs on the plain torch reference path")]
        if INTERPRETED:
            findings.append(Finding("triton", "warning", "TRITON_INTERPRET=1: kernels run in Python, for tests only"))
        return findings
    kind = torch.accelerator.current_accelerator()
    name = kind.type if kind is not None else "cpu"
    if name not in ("cuda", "xpu"):
        return [Finding("device", "note", f"{name}: Triton does not drive it; the plain torch reference path runs")]
    findings = []
    module = torch.cuda if name == "cuda" else torch.xpu
    for index in range(module.device_count()):
        properties = module.get_device_properties(index)
        status: Status = "ok"
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        if name == "cuda" and torch.version.cuda:
            capability = torch.cuda.get_device_capability(index)
            text += f", sm_{capability[0]}{capability[1]}"
            if capability < (8, 0):
                status, text = "warning", f"{text}: no bf16 in hardware; use `bf16: false`, `fp16: true`"
            findings += [Finding(f"gpu {index}", status, text), speeds(f"gpu {index}", capability)]
        else:
            findings.append(Finding(f"gpu {index}", status, text))
    missing = Finding("kernels", "warning", "triton is not installed: the plain torch reference path runs")
    return [*findings, _try_kernel(name) if HAS_TRITON else missing]


def speeds(subject: str, capability: tuple[int, int]) -> Finding:
    """What an NVIDIA GPU of this compute capability runs fast, and what it does not."""
    if capability < (7, 5):
        text = "Triton compiles nothing for GPUs before sm_75: set `use_liger_kernel: false`, or take another GPU"
        return Finding(subject, "warning", text)
    fast = ["our Triton kernels", "fp16"] + (["bf16", "torch's flash attention"] if capability >= (8, 0) else [])
    slow = [] if capability >= (8, 0) else ["bf16 (emulated)", "attention (our kernels, no flash operator)"]
    fp8 = {(9, 0): "fp8"}.get(capability, "fp8 (not tried)" if capability > (9, 0) else "fp8 (not used: from sm_90 on)")
    (fast if capability == (9, 0) else slow).append(fp8)
    if capability[0] in (9, 10):
        fast.append("torch's grouped matmul of experts")
    text = f"fast: {', '.join(fast)}" + (f"; not: {', '.join(slow)}" if slow else "")
    return Finding(subject, "ok", text if capability == (9, 0) else f"{text}; speeds are measured on sm_90 alone")


def _try_kernel(device: str) -> Finding:
    """Runs the smallest real kernel, so that a broken compiler or driver shows here and not in training."""
    import torch

    from liger_trainer.functional import rms_norm

    try:
        x = torch.ones(2, 64, device=device)
        rms_norm(x, torch.ones(64, device=device), 1e-6)
        torch.accelerator.synchronize()
    except Exception as error:  # whatever a compiler, a driver or a launch may raise is the finding
        first = str(error).strip().split("\n")[0][:200]
        return Finding("kernels", "error", f"Triton cannot run here: {type(error).__name__}: {first}")
    names = "RMSNorm, LayerNorm, RoPE, SwiGLU, GeGLU and the fused LM head"
    return Finding("kernels", "ok", f"{names} run as Triton kernels")


def private_names() -> list[Finding]:
    """What features rely on in other libraries: a line for each thing that has changed, and a count of the rest.

    These are private names, and what is recognised by its shape, which is tried.
    """
    import torch

    from liger_trainer.compat import features
    from liger_trainer.compat.private import tried

    os.environ["HF_HUB_OFFLINE"] = "1"  # else bitsandbytes downloads a CPU kernel where `kernels` is installed
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel that training does not use
    findings = []
    for library, group in itertools.groupby(features(), key=lambda feature: feature.library):
        version = installed_version(library)
        if version is None:
            findings.append(Finding(library, "note", "not installed, and not needed without it"))
            continue
        names: set[str] = set()
        recognised: set[str] = set()
        for feature in group:
            status: Status = "error" if feature.needed else "warning"
            problems = [(name.name, name.problem()) for name in feature.names]
            for name, problem in problems:
                if problem is None:
                    names.add(name)
                    continue
                kind = "missing" if problem == "is missing" else f"changed: it {problem}"
                text = f"{name}: {kind}; needed for {feature.text}"
                findings.append(Finding(f"{library} {version}", status, text))
            if feature.canary is None or any(problem for _, problem in problems):
                continue
            changed = tried(feature)
            if changed is None:
                recognised.add(feature.canary)
            else:
                text = f"{changed}; needed for {feature.text}. Install {library}=={TESTED[library]}"
                findings.append(Finding(f"{library} {version}", status, text))
        structures = f", {len(recognised)} structures recognised" if recognised else ""
        findings.append(Finding(f"{library} {version}", "ok", f"{len(names)} private names as expected{structures}"))
    return findings


def traps() -> list[Finding]:
    """Settings and packages that are known to surprise."""
    import torch

    found: list[tuple[str, Status, str]] = []
    liger = installed_version("liger-kernel")
    if liger:
        text = f"{liger} is installed too: with the stock Trainer, the log of `train()` says which of the two ran"
        found.append(("liger-kernel", "note", text))
    for place in {Path.cwd(), *map(Path, filter(None, sys.path))}:
        if (place / "kernels" / "__init__.py").is_file() and not (place / "kernels" / "layer").is_dir():
            text = "hides Hugging Face's `kernels` package, and model imports fail; rename it or remove its __init__.py"
            found.append(("kernels/", "error", f"{place / 'kernels'} {text}"))
    peft = installed_version("peft")
    if peft is not None and available(LEAST_PEFT):
        from transformers.integrations.peft import MIN_PEFT_VERSION as LEAST

        if not is_at_least("peft", LEAST):
            text = f"{peft} is older than the {LEAST} that `model.add_adapter` of the installed transformers asks for; "
            found.append(("peft", "note", f"{text}use a trainer's `peft_config` or `peft.get_peft_model` instead"))
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if count > 1 and "RANK" not in os.environ:
            text = f"a script started plainly would run nn.DataParallel on all {count}; use `liger-trainer train` or "
            text += "`accelerate launch`, or set CUDA_VISIBLE_DEVICES=0"
            found.append(("several GPUs", "note", text))
        if importlib.util.find_spec("flash_attn") is not None:
            text = "not needed for packing or windows; runs where `attn_implementation` names it"
            found.append(("flash-attn", "note", text))
    if os.environ.get("TRITON_INTERPRET") == "1":
        found.append(("TRITON_INTERPRET", "warning", "is 1: kernels run in Python and are very slow; unset it"))
    return [Finding(*line) for line in found or [("traps", "ok", "none of the known ones")]]
