"""One library's runs, in a process of its own: ``python -P training.py JOB``, with a job that `__main__` has written.

A process of stock TRL never imports liger_trainer, and checks at its end that nothing else has: no hook of ours can be
in it. Both get the same weights, rows, seeds and arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

STOCK = "TRL"
GIBIBYTE = 2**30


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: a library, the dtype of the weights, and the arguments that differ from `Task.arguments`."""

    name: str
    ours: bool = True
    dtype: str = "float32"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
    """A trainer's work: its variants, the first of which is stock, and the arguments that all of them get."""

    steps: int
    rows: int  # of a step
    lr: float
    variants: tuple[Variant, ...]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prompts(self) -> int:
        """Different ones in all steps."""
        return self.steps * self.rows // self.arguments.get("num_generations", 1)


_PROVIDERS = (Variant(STOCK, ours=False), Variant("liger_trainer"))
_BF16 = (  # without autocast: the weights are bf16 already
    Variant("liger_trainer, bf16 weights, AdamW", dtype="bfloat16", arguments={"bf16": False}),
    Variant(
        "liger_trainer, bf16 weights, liger_adamw",
        dtype="bfloat16",
        arguments={"bf16": False, "optim": "liger_adamw"},
    ),
)
_FP8 = Variant("liger_trainer, fp8 rowwise_gw_hp", arguments={"fp8": "rowwise_gw_hp"})
BETA = 0.1  # DPO
ANSWER_TOKENS = 12  # GRPO: at most
TASKS = {
    "sft": Task(60, 16, 2e-5, (*_PROVIDERS, *_BF16, _FP8), {"max_length": 512}),
    "dpo": Task(40, 16, 5e-6, _PROVIDERS, {"beta": BETA, "max_length": 512}),
    "grpo": Task(
        40,
        64,
        1e-5,
        _PROVIDERS,
        # Without autocast: with it, a gradient of stock TRL became NaN.
        {"bf16": False, "num_generations": 8, "max_completion_length": ANSWER_TOKENS, "temperature": 1.0},
    ),
}


def read_rows(data: Path, trainer: str, split: str) -> list[dict[str, Any]]:
    """The rows of a split, ``"train"`` or ``"held_out"``, without the column that says so."""
    lines = (data / f"{trainer}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row.pop("split") == split]


def score(text: str, answer: str) -> float:
    """What reasoning-gym's verifier of needle_haystack says of a text: 1 for the answer alone, in any case, else 0."""
    return float(text.replace(" ", "").strip().lower() == answer.strip().lower())


def verifier(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """GRPO's reward."""
    return [score(completion[0]["content"], right) for completion, right in zip(completions, answer)]


class Steps(TrainerCallback):
    """The seconds of each step, generation included, and the peak memory of all steps."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.seconds: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        if self.module is not None:
            gc.collect()  # the trainer of the run before is in reference cycles
            self.module.reset_peak_memory_stats()

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.start = self._now()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(self._now() - self.start)

    def _now(self) -> float:
        if self.module is not None:
            self.module.synchronize()
        return time.perf_counter()

    def peak_gibibytes(self) -> float | None:
        """Peak memory allocated during the steps; None on a CPU."""
        return None if self.module is None else self.module.max_memory_allocated() / GIBIBYTE


def run(job: dict[str, Any], variant: Variant, seed: int, weights: Path) -> dict[str, Any]:
    """Trains once, writes the trained weights in bf16, and returns what each step gave."""
    task, device = TASKS[job["trainer"]], torch.device(job["device"])
    steps = Steps(device)
    with fp8_at_any_size() if "fp8" in variant.arguments else contextlib.nullcontext():
        trainer = _trainer(job, task, variant, seed, steps)
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    save_file({name: weight.detach().bfloat16().contiguous() for name, weight in model.named_parameters()}, weights)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    measures = ("loss", "grad_norm", *(["reward"] if job["trainer"] == "grpo" else []))
    found = {measure: [float(entry[measure]) for entry in history] for measure in measures}
    return {"steps": found | {"seconds": steps.seconds}, "peak_gibibytes": steps.peak_gibibytes()}


def fp8_at_any_size() -> contextlib.AbstractContextManager[object]:
    """Within it, `fp8` takes layers and calls too small for it to be faster: the question here is what is learned."""
    return mock.patch.multiple("liger_trainer.patching.fp8", LEAST_FEATURES=1, LEAST_ROWS=1)


def _trainer(job: dict[str, Any], task: Task, variant: Variant, seed: int, steps: Steps) -> Any:
    from datasets import Dataset

    kind, data = job["trainer"], Path(job["data"])
    settings: dict[str, Any] = {
        "output_dir": job["output"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": task.rows,
        "learning_rate": task.lr,
        "warmup_steps": 5,
        "seed": seed,
        "bf16": job["device"] != "cpu",  # which emulates it
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": job["device"] == "cpu",
    }
    trainer_class, config_class = _classes(kind, variant.ours)
    more: dict[str, Any] = {"dpo": {"ref_model": _model(data, variant)}, "grpo": {"reward_funcs": verifier}}
    return trainer_class(
        model=_model(data, variant),
        args=config_class(**{**settings, **task.arguments, **variant.arguments}),
        train_dataset=Dataset.from_list(read_rows(data, kind, "train")),
        processing_class=AutoTokenizer.from_pretrained(data / "model"),
        callbacks=[steps],
        **more.get(kind, {}),
    )


def _model(data: Path, variant: Variant) -> Any:
    return AutoModelForCausalLM.from_pretrained(data / "model", dtype=getattr(torch, variant.dtype))


def _classes(kind: str, ours: bool) -> tuple[Any, Any]:
    """Trainer and configuration, stock or ours."""
    library, prefix = importlib.import_module("liger_trainer" if ours else "trl"), "Liger" if ours else ""
    name = prefix + kind.upper()
    return getattr(library, f"{name}Trainer"), getattr(library, f"{name}Config")


def main(job: dict[str, Any]) -> None:
    """Runs the job's variants, each with every seed, and leaves weights and a JSON file for each run."""
    variants = {variant.name: variant for variant in TASKS[job["trainer"]].variants}
    for name, seed in job["runs"]:
        file = Path(job["output"], f"{name} {seed}")
        begin = time.perf_counter()
        found = run(job, variants[name], seed, file.with_suffix(".safetensors"))
        file.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
        print(f"{job['trainer']}, {name}, seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
    if not job["ours"] and any(name.split(".")[0] == "liger_trainer" for name in sys.modules):
        raise RuntimeError("liger_trainer was imported in the process of stock TRL; what it measured is not stock")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
