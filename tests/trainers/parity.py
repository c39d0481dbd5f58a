"""Stock TRL trainers and ours on equal seeds: the same keys in every log, and the same numbers."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch import nn

import liger_trainer
from liger_trainer.kernels.head.log_probs import log_probs_reference
from liger_trainer.trainers.trl_mixin import own_fused_head
from tests.forked import torchrun
from tests.trainers.tiny import (
    COMMON,
    WORDS,
    completion_dataset,
    gemma2,
    llama,
    logged,
    mixtral,
    text_dataset,
    tokenizer,
)
from tests.trainers.vision import PROCESSORS, dialogues, pairs, prompts

TOLERANCE = 1e-5
# Rewards and KL are differences of log-probabilities of sequences, whose fp32 neighbours are 4e-6 apart at 40.
OF_DIFFERENCES = 4e-5
# One unit of bf16: CPUs with and without bf16 instructions round gradients to different neighbours.
HALF_TOLERANCE = 2**-8
BASE = {
    **COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,  # or rounding would be a whole step where a gradient is next to nothing
}  # fmt: skip
MODELS = {"llama": llama, "gemma2": gemma2, "mixtral": mixtral}


def save_models(folder) -> dict[str, str]:
    """Folders with the tiny models and the tokenizer, as reference models are loaded from where a policy was."""
    folders = {}
    for name, build in MODELS.items():
        folders[name] = str(folder / name)
        build().save_pretrained(folders[name])
        tokenizer().save_pretrained(folders[name])
    return folders


def _pairs(n: int = 16) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": WORDS[i % 4] + " ", "chosen": WORDS[(i + 1) % 4], "rejected": " ".join(WORDS[i % 3 : i % 3 + 2])}
            for i in range(n)
        ]
    )


def _unpaired(n: int = 16) -> Dataset:
    return Dataset.from_list(
        [{"prompt": WORDS[i % 4] + " ", "completion": WORDS[(i + 1) % 4], "label": i % 3 != 0} for i in range(n)]
    )


def _prompts(n: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": WORDS[i % 4]} for i in range(n)])


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Differs between the completions of one prompt."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(len(text) % 7) + text.count("a") for text in texts]


_GENERATION = {"num_generations": 4, "max_completion_length": 8}
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # name: (dataset, further arguments of the trainer, settings)
    "SFT": (text_dataset, {}, {"max_length": 64}),
    "DPO": (_pairs, {}, {}),
    "KTO": (_unpaired, {}, {}),
    "GRPO": (_prompts, {"reward_funcs": reward}, _GENERATION),
    "RLOO": (_prompts, {"reward_funcs": reward}, _GENERATION),
}
OTHER_KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "ORPO": (_pairs, {}, {}),
    "CPO": (_pairs, {}, {}),
    "Reward": (_pairs, {}, {}),
}
DATASETS = {
    "completions": completion_dataset,
    "pictured dialogues": dialogues,
    "pictured pairs": pairs,
    "pictured prompts": prompts,
}


def lora(*targets: str, **options: Any) -> LoraConfig:
    """An adapter that counts from the first step on."""
    return LoraConfig(target_modules=list(targets) or ["q_proj", "v_proj"], r=4, init_lora_weights=False, **options)


def naive_fused_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """TRL's hook in a few plain lines, on logits that the model builds: right for any head, where TRL's is not."""
    names = {"entropy": "entropy", "log_sum_sq_probs": "sum_squared_probs", "mean_logits": "mean_logit"}
    names["is_top1"] = "top1"
    forward = model.forward

    def with_statistics(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs, **({} if labels is None else {"labels": labels}))
        logits, target = forward(*args, **kwargs).logits[:, :-1], labels[:, 1:]
        found = log_probs_reference(logits, target, temperature=temperature, outputs=tuple(names.values()))
        asked = {theirs: getattr(found, ours) for theirs, ours in names.items() if theirs in outputs}
        mask = target != -100
        loss = -found.log_probs.sum() / mask.sum().clamp(min=1)
        return trl.trainer.utils.FusedCausalLMOutput(loss=loss, log_probs=found.log_probs, label_mask=mask, **asked)

    model.forward = with_statistics


def build(kind: str, ours: bool, output_dir: Any, model: Any, naive: bool = False, **case: Any) -> Any:
    """A trainer of TRL, or ours.

    Args:
        kind: A key of `KINDS` or `OTHER_KINDS`.
        ours: Whether it is ours.
        output_dir: The trainer's output folder.
        model: A folder or a model.
        naive: Whether TRL's trainer gets `naive_fused_head`.
        case: Settings; `own` holds those of ours alone, `data` names or makes a dataset, and some
            (`peft_config`, say) are for the trainer.
    """
    dataset, further, settings = {**KINDS, **OTHER_KINDS}[kind]
    data = case.pop("data", dataset)
    data = DATASETS.get(data, data)
    own = ("eval_dataset", "peft_config", "ref_model", "compute_metrics", "compute_loss_func", "reward_funcs")
    own = (*own, "preprocess_logits_for_metrics", "rollout_func")
    further = {**further, **{name: case.pop(name) for name in own if name in case}}
    further["processing_class"] = PROCESSORS[case.pop("processor")]() if "processor" in case else tokenizer()
    if "peft_config" in further:
        further["peft_config"] = copy.deepcopy(further["peft_config"])
    if "eval_strategy" in case or "compute_metrics" in further:
        further["eval_dataset"] = data(8)
    stable = hasattr(trl, f"{kind}Trainer")
    theirs = trl if stable else importlib.import_module(f"trl.experimental.{kind.lower()}")
    source: Any = liger_trainer if ours else theirs
    prefix = "Liger" if ours else ""
    trainer_class, config_class = (getattr(source, f"{prefix}{kind}{what}") for what in ("Trainer", "Config"))
    own_settings = case.pop("own", {})
    extra = {"kernel_report": False, **own_settings} if ours else {}
    args = config_class(output_dir=str(output_dir), **{**BASE, **settings, **extra, **case})
    torch.manual_seed(0)

    def make() -> Any:
        return trainer_class(model=model, args=args, train_dataset=data(), **further)

    if not naive:
        return make()
    with own_fused_head(liger_trainer_of(kind).trl_module, naive_fused_head):
        return make()


def liger_trainer_of(kind: str) -> Any:
    """Our trainer's class."""
    return getattr(liger_trainer, f"Liger{kind}Trainer")


def assert_close_logs(
    found: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    but: Iterable[str] = (),
    absolute: float = TOLERANCE,
    relative: float = TOLERANCE,
) -> None:
    """The same keys in every log, and the same numbers, but for what measures time."""
    assert len(found) == len(expected)
    for left, right in zip(expected, found):
        assert left.keys() == right.keys()
        for key in left.keys() - {"step_time", "eval_step_time", *but}:
            assert right[key] == pytest.approx(left[key], abs=absolute, rel=relative, nan_ok=True), key


def assert_same_logs(stock: Any, ours: Any, but: Iterable[str] = ()) -> None:
    """Every logged number of at least three logs, relative to the precision of the weights."""
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in stock.model.parameters())
    assert len(logged(stock)) >= 3
    assert_close_logs(logged(ours), logged(stock), but, OF_DIFFERENCES, HALF_TOLERANCE if half else TOLERANCE)


def assert_close_weights(trainer: Any, other: Any, tolerance: float) -> None:
    """Every parameter of two trainers; bit for bit with a tolerance of 0."""
    for (name, expected), got in zip(other.model.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance, msg=name)


def results_of_processes(work: Callable[..., None], folder: Path, **environment: str) -> list[Any]:
    """What each of two gloo processes that run `work(folder)` has written into `rankN.json` there."""
    done = torchrun(work, folder, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_parity(kind: str, output_dir: Any, model: str, naive: bool = False, **case: Any) -> tuple[Any, Any]:
    """Trains both and compares their logs; returns (stock, ours)."""
    stock = build(kind, False, output_dir / "stock", model, naive, **case)
    stock.train()
    ours = build(kind, True, output_dir / "ours", model, **case)
    assert ours._statistics is not None, "the fused head is not ours"
    ours.train()
    # A reference that was computed in other batches differs from the policy by rounding, which then decides who wins.
    but = ["rewards/accuracies"] if case.get("precompute_ref_log_probs") else []
    assert_same_logs(stock, ours, but)
    return stock, ours
