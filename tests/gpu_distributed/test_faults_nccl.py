"""What one rank meets on two GPUs, with NCCL: death, a collective that never comes, and a NaN."""

import pytest

from liger_trainer.recipe.file import accelerate_config
from tests.tools.cli.runs import checkpoints
from tests.tools.cli.test_faults import launched
from tests.trainers.test_two_process_faults import assert_all_act_alike, folders
from tests.trainers.test_two_process_faults import run as run_script

pytestmark = pytest.mark.multigpu


def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    killed = launched(tmp_path / "run", "--use_cpu", "false", fault="kill", step=3)
    assert killed.returncode == 1
    cause = killed.stderr.split("Root Cause")[1]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]


def test_a_signal_that_one_rank_gets_ends_both(tmp_path):
    ended = launched(tmp_path / "run", "--use_cpu", "false", fault="terminate", step=3)
    assert ended.returncode == 1
    assert "exitcode  : 143" in ended.stderr
    # The signal came in step 4 and is read a step later.
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_rank_that_hangs_ends_the_job_after_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    hung = launched(tmp_path / "run", "--use_cpu", "false", "--ddp_timeout", "15", fault="hang", step=3)
    assert hung.returncode == 1
    assert "Timeout" in hung.stderr
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]


def test_all_ranks_act_on_the_nan_of_one_and_name_it(tmp_path):
    done = run_script("nan", tmp_path, "cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_all_act_alike(tmp_path, done.stderr, stops_after=3)  # the flag is read a step later: no step waits for it


def test_a_sharded_checkpoint_that_one_rank_did_not_finish_is_none(tmp_path):
    """FSDP2, where each rank writes its shards of the model and of the optimizer's state."""
    config = tmp_path / "fsdp2.yaml"
    text = accelerate_config("fsdp2").read_text()
    config.write_text(text.replace("FULL_STATE_DICT", "SHARDED_STATE_DICT"))
    launcher = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
    killed = run_script("save", tmp_path / "run", "kill", "cuda", launcher=[*launcher, "--main_process_port", "0"])
    assert killed.returncode == 1
    assert folders(tmp_path / "run") == ["_incomplete", "checkpoint-2"], killed.stderr[-3000:]
    done = run_script("save", tmp_path / "run", "none", "cuda", launcher=[*launcher, "--main_process_port", "0"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert folders(tmp_path / "run") == ["checkpoint-6"]
    assert len(list((tmp_path / "run" / "checkpoint-6").glob("*/*.distcp"))) == 4
