"""Metrics on two processes, whose batches have different lengths: the stock Trainer's, without its logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Trainer

from liger_trainer.head import DeferredLogits
from liger_trainer.trainers.trainer import LigerTrainer
from tests.calls import created_sizes
from tests.forked import torchrun
from tests.trainers.builders import causal
from tests.trainers.test_evaluating_metrics import (
    MEMORY,
    OWN,
    PREPROCESS,
    VOCAB,
    compute_metrics,
    numbers,
    of_all_tokens,
)
from tests.trainers.tiny import llama, token_rows


def rows():
    """The rows of the second process are shorter."""
    return token_rows(2) + token_rows(2, length=7, seed=2) + token_rows(2, seed=3) + token_rows(2, length=9, seed=4)


def work(folder):
    results = {}
    for trainer_class in (LigerTrainer, Trainer):
        ours = trainer_class is LigerTrainer
        options = {"liger_kernel_config": {"logits_memory": MEMORY}} if ours else {}
        seen = []
        for name in ("both", "anything else"):

            def preprocess(logits, labels, name=name, seen=seen):
                seen.append((type(logits), tuple(logits.shape)))
                return PREPROCESS[name](logits, labels)

            trainer = causal(
                folder,
                llama(),
                trainer_class,
                eval_dataset=rows(),
                per_device_eval_batch_size=2,
                compute_metrics=compute_metrics,
                preprocess_logits_for_metrics=preprocess,
                **options,
            )
            sizes = created_sizes(lambda trainer=trainer, ours=ours, name=name: results.update(
                {f"{name} {ours}": trainer.evaluate()}
            ))  # fmt: skip
            results[f"{name} {ours} built"] = bool(sizes & {2 * length * VOCAB for length in (10, 9)})
        results[f"deferred {ours}"] = [kind is DeferredLogits for kind, _ in seen]
        results[f"shapes {ours}"] = [list(shape) for _, shape in seen]
    Path(folder, f"rank{trainer.args.process_index}.json").write_text(json.dumps(results))


def test_two_processes(tmp_path):
    done = torchrun(work, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name in ("both", "anything else"):
            ours, stock = results[f"{name} True"], results[f"{name} False"]
            assert numbers(ours) == pytest.approx(numbers(stock), rel=1e-5)
            assert [ours[key] for key in OWN] == pytest.approx(of_all_tokens(llama(), rows()), rel=1e-5)
        assert all(results["deferred True"])
        assert results["shapes True"] == results["shapes False"] == [[2, 10, VOCAB]] * 4
        assert [results[f"both {ours} built"] for ours in (True, False)] == [False, True]
