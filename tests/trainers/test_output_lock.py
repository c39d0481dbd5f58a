"""One run at a time writes in an output folder, whatever becomes of the one before."""

import errno
import fcntl
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from liger_trainer.trainers.checkpoints.whole import LOCK, owned
from tests import forked
from tests.trainers.test_checkpoints import build


def try_to_own(folder):
    with owned(Path(folder)):
        print("owned", sorted(os.listdir(folder)))


def own_and_die(folder):
    with owned(Path(folder)):
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder, resume=None):
    build(folder).train(resume_from_checkpoint=resume)


def test_the_second_process_is_refused_and_the_first_one_named(tmp_path):
    with owned(tmp_path):
        with owned(tmp_path / "."):  # a trainer inside a recipe's run
            pass
        done = forked.run(try_to_own, str(tmp_path))
        assert done.returncode == 1
        assert f"BlockingIOError: another run (pid {os.getpid()} on " in done.stderr
        assert f"is writing in {str(tmp_path)!r}" in done.stderr
        assert os.listdir(tmp_path) == [LOCK]
    assert os.listdir(tmp_path) == []
    assert forked.run(try_to_own, str(tmp_path)).stdout == f"owned ['{LOCK}']\n"


def test_another_thread_is_refused(tmp_path):
    """The system's lock is the process's."""
    with owned(tmp_path), ThreadPoolExecutor() as threads:
        with pytest.raises(BlockingIOError, match="another run of this process is writing in "):
            threads.submit(try_to_own, tmp_path).result()
        assert "BlockingIOError: another run (pid" in forked.run(try_to_own, str(tmp_path)).stderr
    assert os.listdir(tmp_path) == []


def test_a_killed_run_leaves_the_folder_free(tmp_path):
    assert forked.run(own_and_die, str(tmp_path)).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [LOCK]
    with owned(tmp_path):
        assert f"pid {os.getpid()} " in (tmp_path / LOCK).read_text()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with owned(tmp_path):
        assert "No locks available" in caplog.text
        assert "nothing prevents another run from writing there" in caplog.text


@pytest.mark.parametrize("resume", [None, True])
def test_trainers_that_save_own_their_folder(resume, tmp_path):
    build(tmp_path, max_steps=2).train()
    with owned(tmp_path):
        before = sorted(path for path in tmp_path.rglob("*"))
        done = forked.run(train, str(tmp_path), resume)
        assert done.returncode == 1
        assert "another run (pid" in done.stderr
        assert sorted(path for path in tmp_path.rglob("*")) == before


def test_trainers_that_save_nothing_share_it(tmp_path):
    with owned(tmp_path):
        assert forked.run(train_without_saving, str(tmp_path)).returncode == 0


def train_without_saving(folder):
    build(folder, save_strategy="no", max_steps=1).train()
