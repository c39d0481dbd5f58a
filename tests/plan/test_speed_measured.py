"""The time of a step against every run in `benchmarks/results` that a plan describes."""

import dataclasses
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.records import Run as Results
from liger_trainer.benchmarks.records import TrainingRecord
from liger_trainer.benchmarks.training_providers import IN_FP8
from liger_trainer.plan.estimate import largest_activation_memory
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.speed import LARGEST_ERROR, step_time
from tests.plan.cases import GIB, cluster, run_of

RESULTS = Path("benchmarks/results")
EARLIER = {"dpo-llama.json": "its checkpoints repeated the down projections of MLPs with adapters"}
"""Measured with code that a plan no longer describes."""
_NUMBERS = {1: "one", 2: "two", 4: "four"}
_FORWARDS = {"dpo": 1, "kto": 3}


def why_not(record, command, file):
    """Why a plan does not describe a run; empty if it does."""
    if record.lengths and ":" in record.lengths:
        return "a plan takes every sequence as long as the longest"
    if record.padding or record.documents or (record.labelled or 1) < 1:
        return "a plan takes whole rows with labels"
    if record.group_size and "padded" not in record.provider:
        return "a plan counts a prompt once for each of its completions"
    if "--steps 1 " in command:
        return "a first step, which compiles and pins memory"
    return EARLIER.get(file, "")


def measured():
    """The newest of our runs of each work that a plan describes: card, file and record."""
    found = {}
    for path in sorted(RESULTS.glob("nvidia-*/**/*.json")):
        if "training" not in json.loads(path.read_text()):
            continue
        results, card = Results.read(path), path.relative_to(RESULTS).parts[0].removeprefix("nvidia-").upper()
        for record in results.training:
            if not record.provider.startswith("liger_trainer") or not record.tokens_per_second:
                continue
            if why_not(record, results.command, path.name):
                continue
            work = dataclasses.replace(record, tokens_per_second=0, mfu=None, peak_gibibytes=None, losses=[])
            work = dataclasses.replace(work, kept_gibibytes=None, weights_gibibytes=None)
            before = found.get(key := f"{card} {work}")
            if before is None or before[0] < results.date:
                found[key] = (results.date, card, path.name, record)
    return [each[1:] for each in found.values()]


def predicted(card: str, record: TrainingRecord) -> float:
    """Tokens/s a GPU by the formulas."""
    provider, length, more = record.provider, record.length, {}
    if record.trainer in ("dpo", "kto", "grpo"):
        prompt = record.prompt or length // 8
        length -= 0 if record.trainer == "grpo" and not record.prompt else prompt
        more = {"loss": "log_probs", "prompt": prompt, "scored": _FORWARDS.get(record.trainer, 0)}
        more["rows"] = 2 if record.trainer == "dpo" else 1
    if record.quantize == "nf4":
        more["bits"] = 4
    dtype = getattr(torch, record.dtype or "bfloat16")
    run = run_of(record.model, length, record.layers, record.lora or 0, recompute_mlp=True, dtype=dtype, **more)
    mode = next((IN_FP8[name] for name in sorted(IN_FP8, reverse=True) if provider.startswith(name)), None)
    base = "fp8 base" in provider
    run = dataclasses.replace(run, implementation="liger_trainer", fp8=None if base else mode, fp8_base=base)
    if "liger_adamw" in provider:
        run = dataclasses.replace(run, optim="liger_adamw", mixed=False)
    share = re.search(r"activation_offloading=?([\d.]*)", provider)
    setting = Setting(
        "fsdp2" if record.gpus > 1 else "single",
        record.gpus,
        record.batch,
        checkpointing=record.checkpointing,
        tiled_mlp="tiled_mlp" in provider,
        offloading=float(share[1] or 1) if share else 0.0,
    )
    kept = int((record.kept_gibibytes or 0) * GIB)
    if "activation_memory" in provider and not kept:
        kept = largest_activation_memory(run, setting, record.peak_gibibytes * GIB)
    setting = dataclasses.replace(setting, activation_memory=kept)
    return 1 / step_time(run, setting, cluster(record.gpus, card=card)).token


def group(card, record):
    """The line of the table in the documentation."""
    gpus = f"{_NUMBERS[record.gpus]} {card}" + ("s, FSDP2" if record.gpus > 1 else "")
    if "fp8" in record.provider:
        return f"{gpus}, {'`fp8_base`' if 'fp8 base' in record.provider else '`fp8`'}"
    if record.trainer in ("dpo", "kto", "grpo"):
        return f"{gpus}, KTO and GRPO's loss, LoRA"
    if record.lora:
        return f"{gpus}, LoRA and QLoRA"
    return f"{gpus}, {MODELS[record.model].title}" + (f", {record.layers} layers" if record.layers else "")


CASES = {
    f"{file}, {record.trainer}, {record.provider}, {record.gpus} x {record.batch} x {record.length}": (card, record)
    for card, file, record in measured()
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_a_second(name):
    card, record = CASES[name]
    assert predicted(card, record) == pytest.approx(record.tokens_per_second, rel=LARGEST_ERROR)


def test_the_largest_error_is_the_one_that_is_printed():
    errors = [abs(predicted(*case) / case[1].tokens_per_second - 1) for case in CASES.values()]
    assert LARGEST_ERROR - 0.01 < max(errors) <= LARGEST_ERROR <= 0.08


def test_the_documentation_has_the_errors():
    errors = defaultdict(list)
    for card, record in CASES.values():
        errors[group(card, record)].append(100 * (predicted(card, record) / record.tokens_per_second - 1))
    lines = [
        f"| {name} | {len(found)} | {' to '.join(sorted({f'{min(found):+.1f}', f'{max(found):+.1f}'}, key=float))} |"
        for name, found in sorted(errors.items())
    ]
    page = Path("docs/guides/planning.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "\n".join(lines)
    assert f"compares with {len(CASES)} runs" in page
