"""Two hosts and more: they train as one does, end together, and go on from the last whole checkpoint.

The hosts are namespaces of this machine ([`tests.distributed.hosts`]). What runs on them is forked here; a test of
`make long` starts it as a user does.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from liger_trainer._version import __version__
from liger_trainer.recipe import hosts as product
from liger_trainer.tools.cli import run_recipe_file
from tests.distributed.host_runs import (
    RESUMED,
    TIMEOUT,
    assert_ended_with_a_line,
    assert_succeeded,
    done_on,
    held_at,
    wait_for,
    written,
)
from tests.distributed.hosts import DISK, joined, run_on, why_not
from tests.forked import torchrun
from tests.tools.cli.runs import checkpoints, environment, logged, message_of, weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}")

SLOW = {"delay": 0.02, "rate": 10e6 / 8}  # 20 ms and 10 Mbit/s each way


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of two processes on one host."""
    folder = tmp_path_factory.mktemp("alone")
    done = torchrun(run_recipe_file, written(folder), [])
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def assert_is(run, alone):
    assert logged(run) == logged(alone)
    assert weights(run) == weights(alone)


def test_two_hosts_train_as_one_over_a_slow_link(alone, tmp_path):
    with joined(2, tmp_path, **SLOW) as (hosts, _):
        assert_succeeded(done_on(hosts, written(tmp_path), []))
    assert_is(tmp_path / "run", alone)
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]


def test_a_link_that_drops_in_a_step_ends_both_hosts(alone, tmp_path):
    recipe = written(tmp_path)
    with joined(2, tmp_path) as (hosts, link):
        programs = run_on(hosts, held_at, recipe, [], "step", 3)
        wait_for(tmp_path / "here")
        link.cut = True
        (tmp_path / "go on").touch()
        began = time.monotonic()
        for rank, program in enumerate(programs):
            assert_ended_with_a_line(program.done(4 * TIMEOUT), rank, f"Timed out waiting {TIMEOUT}000ms")
        assert time.monotonic() - began < 2 * TIMEOUT
        assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
        link.cut = False
        assert_succeeded(done_on(hosts, recipe, RESUMED))
    assert_is(tmp_path / "run", alone)


@pytest.mark.parametrize(("place", "step", "rank"), [("step", 3, 0), ("save", 4, 1)])
def test_a_host_that_dies_leaves_whole_checkpoints(place, step, rank, alone, tmp_path):
    recipe, run = written(tmp_path), tmp_path / "run"
    with joined(2, tmp_path) as (hosts, _):
        programs = run_on(hosts, held_at, recipe, [], place, step)
        wait_for(tmp_path / "here")
        if place == "save":  # the other host has written its part, the state last
            wait_for(run / "_incomplete" / "checkpoint-4" / "trainer_state.json")
        hosts[rank].die()
        (tmp_path / "go on").touch()
        assert_ended_with_a_line(programs[1 - rank].done(4 * TIMEOUT), 1 - rank, " by peer")  # closed, or reset
    assert checkpoints(run) == ["checkpoint-2"]
    with joined(2, tmp_path) as (hosts, _):
        assert_succeeded(done_on(hosts, recipe, RESUMED))
    assert_is(run, alone)


def with_another_version(recipe, options):
    """A run whose second process has another version of this package."""
    if os.environ["RANK"] == "1":
        product.__version__ = "0.0.9"
    return run_recipe_file(recipe, options)


def with_another_key(recipe, options):
    """A run whose second process is given another option."""
    return run_recipe_file(recipe, ["--weight_decay", "0.1"] if os.environ["RANK"] == "1" else [])


ALIKE = "all processes of a run must have the same"


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("key", "`weight_decay` is 0.0 on host0, and 0.1 on host1 (rank 1): " + ALIKE),
        ("version", f"liger_trainer is {__version__} on host0, and 0.0.9 on host1 (rank 1): {ALIKE}"),
        ("data", "The training data is "),
        ("file", "`data_files`: "),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_hosts_that_differ_are_refused(differs, message, tmp_path):
    values = {} if differs in ("key", "version") else {"data_files": [str(DISK / "rows.jsonl")], "dataset_name": None}
    recipe = written(tmp_path, **values, test_split_size=None)
    work = {"key": with_another_key, "version": with_another_version}.get(differs, run_recipe_file)
    with joined(2, tmp_path) as (hosts, _):
        for rank, host in enumerate(hosts):
            rows = [
                {"text": f"{number} are {'ants' if rank == 0 or number != 7 else 'bees'}. "} for number in range(60)
            ]
            if differs != "file" or rank == 0:
                (host.disk / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        results = done_on(hosts, recipe, [], work=work)
    for rank, result in enumerate(results):
        assert result.returncode == 2, result.stderr[-3000:]
        assert message in message_of(result.stderr)
        assert differs != "file" or rank == 1 or "rank 1 on host1: " in message_of(result.stderr)
    assert not (tmp_path / "run").exists()


def without_a_recipe(recipe, options):
    """A run whose second process finds no recipe, before there is a process group."""
    return run_recipe_file("none.yaml" if os.environ["RANK"] == "1" else recipe, options)


def test_a_host_without_the_recipe_says_so_and_the_other_does_not_wait_for_ever(tmp_path):
    recipe = written(tmp_path, ddp_timeout=5)
    with joined(2, tmp_path) as (hosts, _):
        waits, fails = done_on(hosts, recipe, [], work=without_a_recipe)
    assert fails.returncode == 2
    assert "No recipe file 'none.yaml'" in message_of(fails.stderr)
    assert_ended_with_a_line(waits, 0, "imed out")


def test_hosts_with_disks_of_their_own(alone, tmp_path):
    recipe, local = written(tmp_path, output_dir=str(DISK / "run")), ["--save_on_each_node", "true"]
    with joined(2, tmp_path) as (hosts, _):
        for result in done_on(hosts, recipe, []):
            assert result.returncode == 2, result.stderr[-3000:]
            assert "which host1 does not share with host0" in message_of(result.stderr)
            assert "set `save_on_each_node: true`" in message_of(result.stderr)
        assert_succeeded(done_on(hosts, recipe, local))
        runs = [host.disk / "run" for host in hosts]
        assert [checkpoints(run) for run in runs] == [["checkpoint-2", "checkpoint-4"]] * 2
        assert weights(runs[1]) == weights(runs[1] / "checkpoint-4") == weights(alone)
        # One host's last checkpoint is not whole: both go on from the one before.
        (runs[1] / "checkpoint-4" / "trainer_state.json").unlink()
        resumed = done_on(hosts, recipe, [*local, *RESUMED])
        assert_succeeded(resumed)
        assert "checkpoint-4 is not complete on host1; it is not used." in resumed[0].stderr
        assert_is(runs[0], alone)
        for step in (2, 4):
            (runs[0] / f"checkpoint-{step}" / "trainer_state.json").unlink()
        for result in done_on(hosts, recipe, [*local, *RESUMED]):
            assert result.returncode == 2, result.stderr[-3000:]
            assert "host1 has the complete checkpoint-4" in message_of(result.stderr)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_hosts_goes_on(count, alone, tmp_path):
    """Data parallel: the weights, the optimizer and the schedule go on; a batch has more or fewer rows."""
    recipe = written(tmp_path, max_steps=2)
    with joined(2, tmp_path) as (hosts, _):
        assert_succeeded(done_on(hosts, recipe, []))
    with joined(count, tmp_path) as (hosts, _):
        results = done_on(hosts, recipe, [*RESUMED, "--max_steps", "4"])
    assert_succeeded(results)
    assert [*logged(tmp_path / "run")] == [1, 2, 3, 4]
    assert {step: loss for step, loss in logged(tmp_path / "run").items() if step < 3}.items() <= logged(alone).items()
    lost = "rng_state_2.pth" if count == 3 else "rng_state.pth"
    assert (f"holds no {lost}" in "".join(result.stderr for result in results)) == (count == 1)


TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint host0:29500 --rdzv_id 1 \
-m liger_trainer train"  # as in docs/guides/several-gpus.md


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["bash examples/two_machines.sh", TORCHRUN], ids=["two_machines", "torchrun"])
def test_two_hosts_as_a_user_starts_them(launcher, alone, tmp_path):
    recipe = written(tmp_path)
    binaries = str(Path(sys.executable).parent)
    variables = environment(
        PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}", MAIN_HOST="host0", GPUS="1",
        CONFIG="configs/accelerate/ddp.yaml",
    )  # fmt: skip
    words = [*launcher.split(), recipe]

    def started(hosts, *options):
        logs = [tmp_path / f"log{host.rank}" for host in hosts]
        return logs, [
            host.command([*words, *options], log, **variables, MACHINE_RANK=str(host.rank))
            for host, log in zip(hosts, logs, strict=True)
        ]

    with joined(2, tmp_path, **SLOW) as (hosts, link):
        logs, programs = started(hosts, "--save_steps", "1")
        wait_for(tmp_path / "run" / "checkpoint-2")
        link.cut = True
        until = time.monotonic() + 3 * TIMEOUT
        for rank, log in enumerate(logs):
            while f"rank {rank} on host{rank}: another process has ended, or no longer answers" not in log.read_text():
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.1)
        link.cut = launcher != TORCHRUN  # whose own process waits for the host of the rendezvous
        assert all(program.wait(6 * TIMEOUT) == 1 for program in programs)
        link.cut = False
        logs, programs = started(hosts, "--resume_from_checkpoint", "true")
        assert [program.wait(6 * TIMEOUT) for program in programs] == [0, 0], logs[0].read_text()[-3000:]
    assert_is(tmp_path / "run", alone)
