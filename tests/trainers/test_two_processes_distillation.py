"""Two gloo processes distil with our trainers and with TRL's: the same numbers in every log."""

import json
import random
from pathlib import Path

import pytest
import torch

from tests.forked import torchrun
from tests.trainers.test_parity_distillation import TRAINERS, build
from tests.trainers.tiny import logged


def work(output_dir):
    results = {}
    for kind in TRAINERS:
        for liger in (False, True):
            case = {"beta": 0.5, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
            trainer = build(kind, liger, Path(output_dir, kind), **case)
            random.seed(5)
            torch.manual_seed(5 + trainer.args.process_index)
            trainer.train()
            results[f"{kind} {liger}"] = logged(trainer)
    Path(output_dir, f"rank{trainer.args.process_index}.json").write_text(json.dumps(results))


def test_two_processes(tmp_path):
    done = torchrun(work, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for kind in TRAINERS:
            for left, right in zip(results[f"{kind} False"], results[f"{kind} True"], strict=True):
                assert left.keys() == right.keys()
                for key in left.keys() - {"step_time"}:
                    assert right[key] == pytest.approx(left[key], abs=1e-5, rel=1e-5), key
