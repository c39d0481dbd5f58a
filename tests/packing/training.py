"""Data of very uneven lengths with much in common, and trainers on it whose gradients and packed rows are looked at."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, TrainerCallback

from liger_trainer.packing.packing import Packing
from tests.attention.shared_layers import build as shared_keys
from tests.patching.mixing_models import built
from tests.tiny_models import COMMON as TINY
from tests.tiny_models import TINY_MODELS
from tests.trainers import parity
from tests.trainers.tiny import WORDS, llama, tokenizer

SYSTEM = " ".join(WORDS[:2]) + " "
LONG = SYSTEM + " ".join(WORDS * 2) + " "
PROMPTS = [SYSTEM + WORDS[2] + " ", "a", LONG, SYSTEM + WORDS[3] + " "]
"""Longer than the window of 16 tokens, but for one token; three with a common beginning."""
ANSWERS = [
    (WORDS[1], WORDS[1]),  # equal
    (WORDS[1] + " " + WORDS[2], WORDS[1]),  # one inside the other
    ("", " ".join(WORDS)),
    (" ".join(WORDS), "a"),
]


def pairs(n: int = 16) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": PROMPTS[i % 4], "chosen": ANSWERS[i // 4 % 4][0], "rejected": ANSWERS[i // 4 % 4][1]}
            for i in range(n)
        ]
    )


def unpaired(n: int = 16) -> Dataset:
    rows = [{"prompt": PROMPTS[i % 4], "completion": ANSWERS[i // 2 % 4][i % 2], "label": i % 3 != 0} for i in range(n)]
    return Dataset.from_list(rows)


def prompts(n: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": PROMPTS[i % 4]} for i in range(n)])


def completed(n: int = 16) -> Dataset:
    return unpaired(n).remove_columns("label")


def prompts_of_one_length(n: int = 16) -> Dataset:
    """Prompts that begin in the same column, though they are padded on the left: a system prompt, and two subjects."""
    subjects = [f"{LONG}{subject} {end}" for subject in "ab" for end in "nt"]
    assert len({len(each) for each in tokenizer()(subjects)["input_ids"]}) == 1
    return Dataset.from_list([{"prompt": subjects[i % 4]} for i in range(n)])


DATA = {
    "SFT": completed,
    "DPO": pairs, "ORPO": pairs, "CPO": pairs, "Reward": pairs, "KTO": unpaired, "GRPO": prompts, "RLOO": prompts,
}  # fmt: skip


OTHERS = {
    "rounded": lambda: llama().bfloat16(),
    "gemma3": TINY_MODELS["gemma3"],
    "gemma4": functools.partial(shared_keys, "E2B"),
    "gemma3n": functools.partial(shared_keys, "3n"),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**TINY)),
    **{name: functools.partial(built, name) for name in ("lfm2", "qwen3_5_text", "nemotron_h")},
}


def often_done(model: Any = llama, times: float = 18.0) -> Any:
    """A model whose completions end early, at different lengths."""
    made = model()
    with torch.no_grad():
        made.get_output_embeddings().weight[2] *= times  # the end of a sequence, likely but nowhere certain
    return made


def save_models(folder: Any, only: Collection[str] = ()) -> dict[str, str]:
    """Folders with `tests.trainers.parity.MODELS` and `OTHERS`, whose completions end early, or some of them."""
    folders = {}
    models = {**parity.MODELS, **OTHERS}
    for name, model in models.items() if not only else ((name, models[name]) for name in only):
        folders[name] = str(folder / name)
        often_done(model, 4.0 if name == "lfm2" else 18.0).save_pretrained(folders[name])
        tokenizer().save_pretrained(folders[name])
    return folders


def by_place(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ between the completions of a prompt, whatever these are."""
    return [float(place % 3) for place in range(len(completions))]


class _FirstGradients(TrainerCallback):
    """Those of all parameters at the first step."""

    gradients: dict[str, torch.Tensor]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.gradients = {
                name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
            }


def trained(kind: str, ours: bool, folder: Any, model: Any, **case: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer on the uneven data after two steps, and the gradients of the first."""
    case = {"data": DATA[kind], "adam_epsilon": 1e-2, **case}
    if kind in ("GRPO", "RLOO"):
        case = {"max_completion_length": 16, "reward_funcs": by_place, **case}
    else:
        case = {"max_length": 96, **case}
    trainer = parity.build(kind, ours, folder, model, **case)
    seen = _FirstGradients()
    trainer.add_callback(seen)
    trainer.train()
    return trainer, seen.gradients


def assert_close_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each parameter's, relative to its norm, and to that of all for those that are nearly 0.

    The gradients of like answers cancel up to a hundredfold, and so do not their roundings.
    """
    assert found.keys() == expected.keys()
    assert found
    total = torch.stack([each.double().norm() for each in expected.values()]).norm()
    assert total > 0
    for name, each in expected.items():
        error = (found[name] - each).double().norm()
        assert error <= 5 * parity.TOLERANCE * max(each.double().norm(), 0.01 * total), (
            f"{name}: {error} of {each.norm()}"
        )


class PackedBatches:
    """What `Packing.rows` returned: of each batch its padded tokens, those of its packed rows, and their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int, int]] = []
        rows = Packing.rows

        def spy(packing: Any, model: Any, kwargs: Any, *args: Any) -> Any:
            found = rows(packing, model, kwargs, *args)
            if found is None:
                assert kwargs["attention_mask"].all(), "a batch stayed padded"
                return found
            tokens = sum(each.inputs["input_ids"].numel() for each in found)
            self.seen.append((kwargs["input_ids"].numel(), tokens, len(found)))
            return found

        monkeypatch.setattr(Packing, "rows", spy)
