"""Folders that a command writes: whole or not at all, whatever kind of empty folder is given."""

import pytest

from liger_trainer.errors import UserError
from liger_trainer.tools.export.folders import new_folder


@pytest.fixture(params=["new", "empty", "link", "here"])
def folder(request, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    if request.param == "link":
        (tmp_path / "link").symlink_to(tmp_path / "real")
        return tmp_path / "link"
    if request.param == "here":
        monkeypatch.chdir(tmp_path / "real")
        return type(tmp_path)(".")
    return tmp_path / ("real" if request.param == "empty" else "new")


def test_what_is_written_is_there_in_the_end(folder):
    exists = folder.exists()
    with new_folder(folder) as unfinished:
        (unfinished / "part").mkdir()
        (unfinished / "part" / "file").write_text("1")
        assert not (folder / "part").exists()
    assert (folder / "part" / "file").read_text() == "1"
    assert [each.name for each in folder.iterdir()] == ["part"]
    if exists:
        with pytest.raises(UserError, match="exists and is not an empty folder"), new_folder(folder):
            pass


def test_nothing_is_left_of_an_error(folder):
    exists = folder.exists()

    def fail():
        with new_folder(folder) as unfinished:
            (unfinished / "file").write_text("1")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert folder.exists() == exists
    assert not exists or not [*folder.iterdir()]


def test_what_an_interruption_left_is_noticed(folder):
    if not folder.exists():
        pytest.skip("beside a folder that is new: test_merging.py::test_an_interrupted_merge_is_noticed")
    (folder / ".unfinished").mkdir()
    with pytest.raises(UserError, match="left of a command that was interrupted"), new_folder(folder):
        pass
