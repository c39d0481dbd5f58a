"""Two gloo processes, one of which meets a NaN, a signal or a full disk: no other waits, and no checkpoint is half."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.forked import torchrun
from tests.trainers.builders import causal, sft
from tests.trainers.tiny import llama

ROOT = Path(__file__).parents[2]
STEPS = 4
SETTINGS = {"per_device_train_batch_size": 2, "kernel_report": False}


class NaNOnRank1:
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if (self.args.process_index, self.state.global_step) == (1, 1) else loss


class PoisonedTrainer(NaNOnRank1, LigerTrainer): ...


class PoisonedSFTTrainer(NaNOnRank1, LigerSFTTrainer): ...


class FaultWhileSaving(LigerTrainer):
    """Rank 1 meets `fault` before the last file of its second checkpoint; rank 0 has written all of its own."""

    fault = "none"

    def _save_rng_state(self, output_dir):
        if self.fault != "none" and self.args.process_index == 1 and self.state.global_step == 4:
            deadline = time.monotonic() + 60
            while not Path(output_dir, "trainer_state.json").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._save_rng_state(output_dir)


def nan(folder, device="cpu"):
    """The guard's decisions on `device`; on the CPU an undisturbed run too."""
    settings = {**SETTINGS, "use_cpu": device == "cpu", "max_steps": STEPS}
    results = {}
    for action in ("stop", "skip"):
        for name, build, trainer_class in (("", causal, PoisonedTrainer), ("sft_", sft, PoisonedSFTTrainer)):
            folder_of_run = f"{folder}/{name}{action}"
            trainer = build(folder_of_run, trainer_class=trainer_class, non_finite=action, **settings)
            results[f"{name}{action}"] = outcome(trainer)
    if device == "cpu":
        save(f"{folder}/whole")
    Path(folder, f"rank{trainer.args.process_index}.json").write_text(json.dumps(results))


def outcome(trainer):
    trainer.train()
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    return {"steps": trainer.state.global_step, "finite": finite, "findings": trainer._guard.findings}


def save(folder, fault="none", device="cpu"):
    settings = {
        **SETTINGS,
        "use_cpu": device == "cpu",
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
    }
    trainer = causal(folder, llama(attention_dropout=0.1), FaultWhileSaving, **settings)
    trainer.fault = fault
    trainer.train(resume_from_checkpoint=Path(folder, "checkpoint-2").exists() or None)
    if trainer.is_world_process_zero():
        losses = [[log["step"], log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]
        Path(folder, "losses.json").write_text(json.dumps(losses))


def run(*arguments, launcher=("torch.distributed.run", "--nproc_per_node=2", "--standalone")):
    """A function of this file, started as a user starts a script."""
    command = [sys.executable, "-m", *launcher, "-m", "tests.trainers.test_two_process_faults"]
    command += map(str, arguments)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=180, capture_output=True, text=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = torchrun(nan, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stderr


def test_all_ranks_act_on_the_nan_of_one_and_name_it(undisturbed):
    assert_all_act_alike(*undisturbed, stops_after=2)


def assert_all_act_alike(folder, stderr, stops_after):
    """What `nan` has to leave; `stops_after` is the step at which the finding of step 2 is read."""
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for name, result in ranks[0].items():
        stops = name.endswith("stop")
        assert result["finite"]
        assert result["steps"] == (stops_after if stops else STEPS)
        (finding,) = result["findings"]  # and not "the gradient", which rank 0 saw of it
        assert finding.startswith("Step 2, rank 1: the loss (nan) is not finite.")
        assert stderr.count(finding) == 2, "logged by one process, for the Trainer and for SFT's"
        assert (folder / name / f"checkpoint-{stops_after}").is_dir() == stops


def test_a_checkpoint_that_one_rank_did_not_finish_is_none(undisturbed, tmp_path):
    whole = undisturbed[0] / "whole"
    full = torchrun(save, tmp_path, "full")
    assert full.returncode == 1
    assert folders(tmp_path) == ["checkpoint-2"]
    assert f"{tmp_path}/checkpoint-4 could not be written ([Errno 28] No space left on device)" in full.stderr
    assert "MiB were free there" in full.stderr

    killed = torchrun(save, tmp_path, "kill")
    assert killed.returncode == 1
    assert folders(tmp_path) == ["_incomplete", "checkpoint-2"]
    # Rank 0 had written what the Trainer writes last: missing is a part of rank 1.
    assert (tmp_path / "_incomplete" / "checkpoint-4" / "trainer_state.json").is_file()

    done = torchrun(save, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "losses.json").read_text()) == json.loads((whole / "losses.json").read_text())
    assert folders(tmp_path) == folders(whole) == ["checkpoint-6"]
    files = {path.name for path in (whole / "checkpoint-6").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "trainer_state.json"} <= files
    assert {path.name for path in (tmp_path / "checkpoint-6").iterdir()} == files


def folders(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"nan": nan, "save": save}[sys.argv[1]](*sys.argv[2:])
