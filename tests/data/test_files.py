"""Files of every kind, patterns and folders, read as one dataset."""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import zipfile

import pytest
from datasets import Dataset

from liger_trainer.data import files
from liger_trainer.data.files import FileError, find_files, load_files

ROWS = [{"question": "one, two?", "answer": "3"}, {"question": "ü", "answer": "4"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def write(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffixes[0]
    if kind == ".parquet":
        Dataset.from_list(ROWS).to_parquet(path)
        return path
    text = {
        ".jsonl": LINES,
        ".ndjson": LINES,
        ".json": json.dumps(ROWS),
        ".csv": 'question,answer\n"one, two?",3\nü,4\n',
        ".tsv": "question\tanswer\none, two?\t3\nü\t4\n",
    }[kind]
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix)
    path.write_bytes(text.encode() if packed is None else packed(text.encode()))
    return path


def test_pictures_are_found_beside_the_data_or_here(tmp_path, monkeypatch):
    there, here = tmp_path / "data", tmp_path / "here"
    for folder, name in ((there, "a.png"), (there, "b.png"), (here, "b.png")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    monkeypatch.chdir(here)
    file = there / "seen.jsonl"
    rows = [{"images": ["a.png", "https://x.org/y.png"], "text": "one"}, {"images": ["b.png"], "text": "two"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = load_files([str(file)], "data_files", bool)
    assert found["images"][:] == [[str(there / "a.png"), "https://x.org/y.png"], [str(here / "b.png")]]
    assert found["text"][:] == ["one", "two"]
    file.write_text(json.dumps({"image": "c.png", "text": "one"}))
    with pytest.raises(FileError, match=r"`data_files`: row 1 has the picture 'c.png', which is not in .*here or in"):
        load_files([str(file)], "data_files", bool)
    file.write_text(json.dumps({"image": "a.png", "images": ["a.png"], "text": "one"}))
    with pytest.raises(FileError, match="`data_files` has pictures in `image` and in `images`"):
        load_files([str(file)], "data_files", bool)


def test_another_version_makes_what_is_cached_again(tmp_path, monkeypatch):
    """`datasets` finds what it has cached by a fingerprint of the function, in which ours is a name."""
    (tmp_path / "a.png").touch()
    file = tmp_path / "seen.jsonl"
    file.write_text(json.dumps({"image": "a.png", "text": "one"}))
    now, again = (load_files([str(file)], "data_files", bool)._fingerprint for _ in range(2))
    monkeypatch.setattr(files, "OfThisVersion", functools.partial(files.OfThisVersion, version="0.0.9"))
    before = load_files([str(file)], "data_files", bool)._fingerprint
    assert now == again != before


@pytest.mark.parametrize("name", ["image", "images"])
def test_pictures_become_lists(name, tmp_path):
    (tmp_path / "a.png").touch()
    found = str(tmp_path / "a.png")
    for value, listed in ((None, []), ("a.png", [found]), ('["a.png", "a.png"]', [found, found])):
        (tmp_path / "seen.jsonl").write_text(json.dumps({name: value, "text": "one"}), encoding="utf-8")
        rows = load_files([str(tmp_path / "seen.jsonl")], "data_files", bool)
        assert rows.to_list() == [{"text": "one", "images": listed}]


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet"),
        *("a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.csv.gz", "a.tsv.gz", "a.json.gz"),
    ],
)
def test_kinds_of_files(name, tmp_path):
    rows = load_files([str(write(tmp_path, name))], "data_files", str.islower).to_list()
    assert [{key: str(value) for key, value in row.items()} for row in rows] == ROWS


def test_arrow_and_text(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert load_files([str(file)], "data_files", str.islower).to_list() == ROWS
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert load_files([str(tmp_path / "a.txt")], "data_files", str.islower).to_list() == [
        {"text": "one"},
        {"text": "two"},
    ]


def test_rows_under_one_key_of_a_json_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "1", "data": ROWS}), encoding="utf-8")
    assert load_files([str(path)], "data_files", str.islower).to_list() == ROWS


def test_a_zipped_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("a.jsonl", LINES)
    assert load_files([str(tmp_path / "a.jsonl.zip")], "data_files", str.islower).to_list() == ROWS


def test_patterns_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data/b.jsonl", "data/a.jsonl", "data/deep/c.jsonl"):
        write(tmp_path, name)
    (tmp_path / "data" / "README.md").write_text("about", encoding="utf-8")
    assert find_files(["data/*.jsonl"], "data_files") == ["data/a.jsonl", "data/b.jsonl"]
    assert find_files(["data/**/*.jsonl"], "data_files") == ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]
    assert find_files(["data"], "data_files") == ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]
    assert find_files(["data", "data/a.jsonl"], "data_files") == find_files(["data"], "data_files")
    assert len(load_files(["data"], "data_files", str.islower)) == 6


def test_hidden_files_of_a_folder_are_passed_by(tmp_path):
    for name in ("data/a.jsonl", "data/._a.jsonl", "data/.ipynb_checkpoints/a-checkpoint.jsonl"):
        write(tmp_path, name)
    assert find_files([str(tmp_path / "data")], "data_files") == [str(tmp_path / "data" / "a.jsonl")]
    hidden = str(tmp_path / "data" / ".ipynb_checkpoints")
    assert find_files([hidden], "data_files") == [f"{hidden}/a-checkpoint.jsonl"]  # named itself


@pytest.mark.parametrize("name", ["a[1].jsonl", "a[1].csv", "a {b} (2).jsonl"])
def test_a_name_with_signs_of_a_pattern(name, tmp_path):
    write(tmp_path, name)
    assert len(load_files([str(tmp_path / name)], "data_files", str.islower)) == 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", LINES.encode("utf-16"), "Save the text as UTF-8."),
        ("a.json", b"[]", "hold no rows."),
        ("a.csv", b"question,answer\na,b,c\n", "have more cells than the first row; put cells with commas in quotes."),
        ("a.csv", b"question,answer\na,b\na,b,c\n", "Expected 2 fields in line 3, saw 3"),
    ],
)
def test_files_that_are_not_what_they_seem_are_one_line(name, text, words, tmp_path, capfd):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(FileError) as caught:
        load_files([str(tmp_path / name)], "data_files", str.islower)
    assert str(caught.value).endswith(words)
    assert "Failed to" not in capfd.readouterr().err  # of the library's own log


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ([], ["none.jsonl"], "`data_files`: there is no file 'none.jsonl' (relative to "),
        ([], ["*.jsonl"], "there is no file '*.jsonl'"),
        ([], ["."], "the folder '.' holds no file that ends in .json, "),
        (["a.jsonl", "b.csv"], ["."], "give files of one kind: .json, "),
        (["a.csv", "b.tsv"], ["."], "give files of one kind: .json, "),
    ],
)
def test_files_that_cannot_be_read(names, given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in names:
        write(tmp_path, name)
    with pytest.raises(FileError) as caught:
        load_files(given, "data_files", str.islower)
    assert words in str(caught.value)


def test_other_kinds_and_damaged_files(tmp_path):
    for name, text, words in [
        ("a.md", "x", "give files of one kind"),
        ("a.jsonl", "{", "cannot be read"),
        ("b.csv", "", "is empty"),
    ]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=words):
            load_files([str(tmp_path / name)], "data_files", str.islower)


def test_cells_of_text_stay_text(tmp_path):
    for name, blank in (("a.csv", ","), ("a.tsv", "\t")):
        lines = ["question,answer,count", "007,NA,5", "1.50,,6"]
        (tmp_path / name).write_text("\n".join(lines).replace(",", blank), encoding="utf-8")
        rows = load_files([str(tmp_path / name)], "data_files", lambda name: name != "count").to_list()
        assert rows[0] == {"question": "007", "answer": "NA", "count": 5}
        assert rows[1] == {"question": "1.50", "answer": None, "count": 6}


@pytest.mark.parametrize(
    ("names", "texts"),
    [(("a.jsonl", "b.jsonl"), ('{"q": "a"}', '{"q": "a", "r": 1}')), (("a.csv", "b.csv"), ("q\na\n", "r,q\na,b\n"))],
)
def test_files_with_other_columns_are_named(names, texts, tmp_path):
    files = [tmp_path / name for name in names]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"a\.\w+' has the columns q, and '.*b\.\w+' .*; give files"):
        load_files([*map(str, files)], "data_files", str.islower)


def test_files_with_other_types_are_named(tmp_path):
    for name, value in (("a.jsonl", 1), ("b.jsonl", "x")):
        (tmp_path / name).write_text(json.dumps({"q": "a", "r": value}) + "\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"`r` holds int in '.*a\.jsonl' and str in '.*b\.jsonl'; give one type\."):
        load_files([str(tmp_path)], "data_files", str.islower)
