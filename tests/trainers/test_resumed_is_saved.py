"""A resumed run has the bits of one that was not interrupted: in every trainer, wherever its checkpoint was saved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.trainers.builders import causal
from tests.trainers.parity import assert_close_weights, build, lora, results_of_processes
from tests.trainers.test_parity_distillation import build as build_distillation
from tests.trainers.tiny import WORDS, llama, logged, text_dataset, token_rows, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED = {
    "save_strategy": "steps", "save_steps": 1, "max_steps": 5, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
}  # fmt: skip
TIMES = ("step_time", "eval_step_time", "total_flos")

Make = Callable[[Any, str], Any]
"""A trainer for an output folder and a folder with the model."""


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that draws random numbers while it trains."""
    folder = str(tmp_path_factory.mktemp("dropout"))
    llama(attention_dropout=0.1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def disturbed() -> None:
    """Other random numbers than at the beginning of the first run."""
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)


def logs_after(trainer: Any, step: int) -> list[dict[str, Any]]:
    logs = [log for log in logged(trainer) if log["step"] > step and "train_loss" not in log]
    return [{key: value for key, value in log.items() if key not in TIMES} for log in logs]


def assert_resumes(make: Callable[[Any], Any], folder: Path, *steps: int) -> tuple[Any, Any]:
    """Trains once, and again from the checkpoint of the first of `steps`, from that run's of the second, and so on.

    Returns:
        The run that was not interrupted, and the last one that was.
    """
    last = whole = make(folder / "whole")
    whole.train()
    for step in steps:
        assert 0 < step < whole.state.global_step
        checkpoint = Path(last.args.output_dir, f"checkpoint-{step}")
        last = make(folder / f"from{step}")
        disturbed()
        last.train(resume_from_checkpoint=str(checkpoint))
        assert last.state.global_step == whole.state.global_step
        for found, expected in zip(logs_after(last, step), logs_after(whole, step), strict=True):
            assert found == expected, step
        assert_close_weights(last, whole, tolerance=0)
    return whole, last


def trl(kind: str, **case: Any) -> Make:
    return lambda folder, model: build(kind, True, folder, model, **{**SAVED, **case})


def distillation(kind: str, **case: Any) -> Make:
    return lambda folder, _: build_distillation(kind, True, folder, **{**SAVED, **case})


def prompts(count: int) -> Callable[..., Dataset]:
    return lambda n=count: Dataset.from_list([{"prompt": f"{WORDS[i % 4]} {i}"} for i in range(n)])


def stream(rows: Callable[..., Dataset]) -> Callable[..., IterableDataset]:
    return lambda *n: rows(*n).to_iterable_dataset().shuffle(seed=5, buffer_size=4)


def plain(rows: Any = None, **case: Any) -> Make:
    return lambda folder, model: causal(folder, llama(attention_dropout=0.1), rows=rows, **{**SAVED, **case})


class NoisyCollator:
    """Draws random numbers of all kinds for each batch."""

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        noise = int(torch.randint(3, 60, ())) + random.randrange(30) + int(numpy.random.randint(30))
        return {**batch, "input_ids": batch["input_ids"].clamp(max=noise)}


BUFFERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 4}
TWICE = {**BUFFERED, "steps_per_generation": 2, "num_iterations": 2}
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "causal": (plain(), (2, 4)),
    "causal, second epoch": (plain(token_rows(8)), (2, 3)),
    "causal, order from all random numbers": (
        plain(token_rows(14), accelerator_config={"use_seedable_sampler": False}, max_steps=6), (1, 4, 5),
    ),
    "causal, by length": (plain(token_rows(14), train_sampling_strategy="group_by_length"), (2, 4)),
    "causal, collated at random": (plain(token_rows(12), data_collator=NoisyCollator()), (1, 2, 3)),
    "SFT": (trl("SFT"), (3,)),
    "SFT, packed": (trl("SFT", packing=True, max_length=16), (1, 3)),
    "SFT, LoRA": (trl("SFT", peft_config=lora(lora_dropout=0.2)), (3,)),
    "SFT, evaluated": (trl("SFT", eval_strategy="steps", eval_steps=1), (2,)),
    "SFT, logged every third step": (trl("SFT", logging_steps=3), (1, 4)),
    "causal, workers": (plain(token_rows(14), dataloader_num_workers=1), (2, 4)),
    "causal, saved at the end of epochs": (plain(token_rows(10), save_strategy="epoch"), (3,)),
    "SFT, streamed": (trl("SFT", data=stream(lambda: text_dataset(8))), (1, 2, 3, 4)),
    "DPO": (trl("DPO"), (3,)),
    "KTO": (trl("KTO"), (3,)),
    **{
        f"{kind}, moving reference": (trl(kind, **{"beta": 0.2, **MOVING, **case}), (3,))
        for kind, case in (("DPO", {}), ("KTO", {}), ("GRPO", {"data": prompts(16)}), ("RLOO", {"data": prompts(16)}))
    },
    "ORPO": (trl("ORPO", logging_steps=3), (1,)),
    "CPO": (trl("CPO"), (3,)),
    "Reward": (trl("Reward"), (3,)),
    "GRPO": (trl("GRPO", data=prompts(16), **BUFFERED), (2, 4)),
    "GRPO, two iterations": (trl("GRPO", data=prompts(16), **TWICE), (1, 3)),
    "GRPO, second epoch": (trl("GRPO", data=prompts(4), **{**BUFFERED, "steps_per_generation": 2}), (2, 3, 4)),
    "GRPO, evaluated": (trl("GRPO", data=prompts(16), **BUFFERED, eval_strategy="steps", eval_steps=2), (2,)),
    "GRPO, adaptive entropy": (
        trl("GRPO", data=prompts(16), **BUFFERED, use_adaptive_entropy=True, entropy_coef=0.01), (3,),
    ),
    "GRPO, streamed": (trl("GRPO", data=stream(prompts(4)), **{**BUFFERED, "steps_per_generation": 2}), (1, 3)),
    "RLOO": (trl("RLOO", data=prompts(16), **BUFFERED), (2, 4)),
    "GKD": (distillation("gkd", lmbda=0.5), (2,)),
    "distillation": (distillation("distillation"), (2,)),
}  # fmt: skip


LONG = (
    *("causal, second epoch", "causal, workers", "causal, saved at the end of epochs", "SFT, packed", "SFT, LoRA"),
    *("SFT, evaluated", "GRPO, evaluated", "GRPO, adaptive entropy", "GRPO, streamed"),
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES])
def test_every_trainer(case: str, with_dropout: str, tmp_path: Path) -> None:
    make, steps = CASES[case]
    assert_resumes(lambda folder: make(folder, with_dropout), tmp_path, *steps)


def stripped(checkpoint: Path) -> str:
    """`checkpoint` as a stock trainer writes it."""
    path = checkpoint / "rng_state.pth"
    state = torch.load(path, weights_only=False)
    del state["liger_trainer"]
    torch.save(state, path)
    return str(checkpoint)


def test_a_stock_checkpoint_resumes_with_a_line(with_dropout: str, tmp_path: Path, caplog: Any) -> None:
    make, _ = CASES["GRPO"]
    make(tmp_path, with_dropout).train()
    resumed = make(tmp_path / "resumed", with_dropout)
    resumed.train(resume_from_checkpoint=stripped(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 5
    lines = [record.getMessage() for record in caplog.records if "holds no" in record.getMessage()]
    assert len(lines) == 1
    assert "completions that wait to be trained on are generated again" in lines[0]


def test_a_stock_checkpoint_of_a_stream_is_at_its_place(with_dropout: str, tmp_path: Path) -> None:
    make, _ = CASES["SFT, streamed"]
    whole = make(tmp_path, with_dropout)
    whole.train()
    resumed = make(tmp_path / "resumed", with_dropout)
    resumed.train(resume_from_checkpoint=stripped(tmp_path / "checkpoint-3"))
    assert [log["loss"] for log in logs_after(resumed, 3)] == [log["loss"] for log in logs_after(whole, 3)]
    assert_close_weights(resumed, whole, tolerance=0)


def test_completions_of_another_layout_are_left_out(with_dropout: str, tmp_path: Path, caplog: Any) -> None:
    data = prompts(16)
    trl("GRPO", data=data, **BUFFERED)(tmp_path, with_dropout).train()
    other = trl("GRPO", data=data, **{**BUFFERED, "steps_per_generation": 8})(tmp_path / "other", with_dropout)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert other.state.global_step == 5
    assert "`steps_per_generation` differ from those of the checkpoint" in caplog.text


def test_another_seed_orders_the_data_anew(with_dropout: str, tmp_path: Path) -> None:
    """Of which only the steps that are left are run."""
    make, _ = CASES["causal"]
    whole = make(tmp_path, with_dropout)
    whole.train()
    other = plain(data_seed=11)(tmp_path / "other", with_dropout)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logs_after(other, 2) != logs_after(whole, 2)


def test_the_loss_of_the_run_is_that_of_the_steps_since_the_checkpoint(with_dropout: str, tmp_path: Path) -> None:
    make, _ = CASES["SFT, logged every third step"]
    whole = make(tmp_path, with_dropout)
    whole.train()
    each = trl("SFT")(tmp_path / "each", with_dropout)
    each.train()
    resumed = make(tmp_path / "resumed", with_dropout)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    losses = [log["loss"] for log in each.state.log_history if "loss" in log]
    assert resumed.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses[1:]) / 4, rel=1e-6)


def two_processes(folder: Path) -> None:
    """Each has completions, a stream and an order of its own."""
    model = str(folder / "model")
    for name in ("GRPO", "SFT, streamed", "causal, order from all random numbers"):
        make, _ = CASES[name]
        assert_resumes(lambda output, make=make: make(output, model), folder / name, 3)
    Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text("true")


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    llama(attention_dropout=0.1).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    assert results_of_processes(two_processes, tmp_path) == [True, True]
