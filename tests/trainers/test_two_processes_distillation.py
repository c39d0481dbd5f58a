"""Two gloo processes distil with our trainers and with TRL's: the same numbers in every log."""

import json
import random
from pathlib import Path

import pytest
import torch

from tests.trainers.parity import assert_close_logs, results_of_processes
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
    with pytest.raises(ValueError, match="`torch_compile` is true under DDP") as refused:
        build("distillation", True, Path(output_dir, "compiled"), torch_compile=True, **case)
    results["compiled"] = str(refused.value)
    Path(output_dir, f"rank{trainer.args.process_index}.json").write_text(json.dumps(results))


def test_two_processes(tmp_path):
    for results in results_of_processes(work, tmp_path):
        assert "gradients are not averaged" in results["compiled"]
        assert_close_logs(results["distillation True"], results["distillation False"])
        ours, stock = (results[f"gkd {liger}"][0] for liger in (True, False))
        for key in ("loss", "grad_norm"):  # TRL divides by the labels of both processes, and then takes their mean
            assert ours[key] == pytest.approx(2 * stock[key], rel=1e-5)
