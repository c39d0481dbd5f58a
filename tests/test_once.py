"""A folder is shared by the test processes of a run, of which one at a time is inside."""

import fcntl
from types import SimpleNamespace

import pytest

from tests.once import shared_folder


def test_processes_of_a_run_share_a_folder_in_turns(tmp_path, monkeypatch):
    first, second = (SimpleNamespace(getbasetemp=lambda name=name: tmp_path / name) for name in ("gw0", "gw1"))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with shared_folder(first, "made") as folder, folder.with_suffix(".lock").open("w") as other:
        (folder / "done").touch()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with shared_folder(second, "made") as again:
        assert (again / "done").exists()


def test_a_run_of_one_process_has_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with shared_folder(tmp_path_factory, "made") as first, shared_folder(tmp_path_factory, "made") as second:
        assert first != second
