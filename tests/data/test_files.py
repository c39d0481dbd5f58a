"""Files of every kind, patterns and folders, read as one dataset."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zipfile
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image
from datasets.fingerprint import Hasher
from PIL import Image as Picture

from liger_trainer._version import OfThisVersion
from liger_trainer.data import files
from liger_trainer.data.files import FileError, find_files, load_files
from liger_trainer.recipe.load import check_values
from liger_trainer.tools.diagnosis.sample import converted_rows

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
    for folder, name in ((there, "a.png"), (there, "b.png"), (here, "b.png"), (here, "c.png")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    monkeypatch.chdir(here)
    file = there / "seen.jsonl"
    rows = [{"images": ["a.png", "https://x.org/y.png"], "text": "one"}, {"images": ["b.png"], "text": "two"}]
    rows.append({"images": ["c.png"], "text": "three"})
    file.write_text("\n".join(map(json.dumps, rows)))
    found = load_files([str(file)], "data_files", bool)
    assert found["images"][:] == [
        [str(there / "a.png"), "https://x.org/y.png"],
        [str(there / "b.png")],
        [str(here / "c.png")],
    ]
    assert found["text"][:] == ["one", "two", "three"]
    file.write_text(json.dumps({"image": "d.png", "text": "one"}))
    with pytest.raises(FileError, match=r"`data_files`: row 1 has the picture 'd.png', which is not in .*data or in"):
        load_files([str(file)], "data_files", bool)
    file.write_text(json.dumps({"image": "a.png", "images": ["a.png"], "text": "one"}))
    with pytest.raises(FileError, match="`data_files` has pictures in `image` and in `images`"):
        load_files([str(file)], "data_files", bool)


def test_a_picture_is_in_the_folder_of_its_own_file(tmp_path):
    for name in ("A", "B/deep", "B", "C"):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "p.png").touch()
        lines = [json.dumps({"image": "p.png", "text": name})] * len(name)
        (folder / "e.jsonl").write_text("\n".join(lines))
    for given in ([tmp_path], [tmp_path / "C" / "e.jsonl", tmp_path / "A"]):
        rows = load_files([*map(str, given)], "data_files", bool)
        assert rows["images"][:] == [[str(tmp_path / name / "p.png")] for name in rows["text"]]
    assert rows["text"][:] == ["C", "A"]


def test_a_picture_that_has_gone_is_missed_though_rows_are_cached(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    picture, file = tmp_path / "a.png", tmp_path / "seen.jsonl"
    picture.touch()
    file.write_text(json.dumps({"image": "a.png", "text": "one"}))
    assert load_files([str(file)], "data_files", bool)["images"][:] == [[str(picture)]]
    moved = picture.rename(tmp_path / "here" / "a.png")
    assert load_files([str(file)], "data_files", bool)["images"][:] == [[str(moved)]]
    moved.unlink()
    with pytest.raises(FileError, match=r"row 1 has the picture 'a.png', which is not in"):
        load_files([str(file)], "data_files", bool)


def test_other_ways_to_name_a_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b.png").touch()
    found = str(tmp_path / "a b.png")
    for value in ("~/a b.png", f"file://{found.replace(' ', '%20')}", {"path": "a b.png"}, [{"path": "a b.png"}]):
        (tmp_path / "seen.jsonl").write_text(json.dumps({"image": value, "text": "one"}))
        assert load_files([str(tmp_path / "seen.jsonl")], "data_files", bool)["images"][:] == [[found]]
    for value in ([["a b.png"]], 5, [None], {"url": "a b.png"}):
        (tmp_path / "seen.jsonl").write_text(json.dumps({"image": value, "text": "one"}))
        with pytest.raises(FileError, match=r"row 1 has .* for a picture; give a path, a URL or base64\."):
            load_files([str(tmp_path / "seen.jsonl")], "data_files", bool)


def test_pictures_in_a_file_stay(tmp_path):
    rows = Dataset.from_dict({"image": [Picture.new("RGB", (2, 2), (255, 0, 0))]}, Features({"image": Image()}))
    rows.to_parquet(tmp_path / "seen.parquet")
    ((found,),) = load_files([str(tmp_path / "seen.parquet")], "data_files", bool)["images"][:]
    assert found.getpixel((0, 0)) == (255, 0, 0)


def test_another_version_makes_what_is_cached_again(tmp_path, monkeypatch):
    """`datasets` finds what it has cached by a fingerprint of the function, in which ours is a name."""
    (tmp_path / "a.png").touch()
    file = tmp_path / "seen.jsonl"
    file.write_text(json.dumps({"image": "a.png", "text": "one"}))
    now, again = (load_files([str(file)], "data_files", bool)._fingerprint for _ in range(2))
    monkeypatch.setattr(files, "__version__", "0.0.9")
    before = load_files([str(file)], "data_files", bool)._fingerprint
    assert now == again != before
    assert Hasher.hash(OfThisVersion(len)) != Hasher.hash(OfThisVersion(len, "0.0.9"))  # of rows that are in no file


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
        (
            "a.csv",
            b"question,answer\na,b\na,b,c\n",
            "line 3 has 3 cells, and the first line 2; put cells with commas in quotes.",
        ),
        ("broken.jsonl", b'{"q": "a"}\n{"q": "b"\n', "line 2 of 'broken.jsonl' is not JSON: Expecting ',' delimiter."),
        (
            "broken.json",
            b'[{"q": "a"},\n{"q" "b"}]',
            "is not JSON: Expecting ':' delimiter: line 2 column 6 (char 18).",
        ),
        ("a.jsonl", b'["a"]\n["c"]\n', 'list, and must be a row such as {"prompt": "...", "completion": "..."}.'),
        ("a.json", b'[["a", "b"]]', 'are lists; a row is a mapping such as {"prompt": "...", "completion": "..."}.'),
    ],
)
def test_files_that_are_not_what_they_seem_are_one_line(name, text, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(text)
    with pytest.raises(FileError) as caught:
        load_files([name], "data_files", str.islower)
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
        lines = ["question,answer,zip,margin", "007,NA,1e5,5", "1.50,,,6.5", "5,True,00712,"]
        (tmp_path / name).write_text("\n".join(lines).replace(",", blank), encoding="utf-8")
        rows = load_files([str(tmp_path / name)], "data_files", lambda name: name != "margin").to_list()
        assert rows == [
            {"question": "007", "answer": "NA", "zip": "1e5", "margin": 5.0},
            {"question": "1.50", "answer": None, "zip": None, "margin": 6.5},
            {"question": "5", "answer": "True", "zip": "00712", "margin": None},
        ]


def test_tables_begin_with_many_empty_cells_or_another_column(tmp_path):
    (tmp_path / "a.csv").write_text("q,r\n" + "x,\n" * 10_001 + "y,1\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("r,q\n2,z\n", encoding="utf-8")
    rows = load_files([str(tmp_path)], "data_files", bool)
    assert rows[10_000:] == {"q": ["x", "y", "z"], "r": [None, "1", "2"]}


def test_cells_of_a_recipe_are_text(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,label,zip\na,1,1,007\nb,2,False,\n", encoding="utf-8")
    values = {"data_files": [str(tmp_path / "a.csv")], "model_name_or_path": ""}

    def rows(trainer, **more):
        return converted_rows(check_values({"trainer": trainer, **values, **more}, [], tmp_path)[0], tmp_path)

    assert rows("sft", prompt_template="Zip {zip}:")["prompt"][:] == ["Zip 007:", "Zip :"]
    assert rows("kto")["label"][:] == [True, False]
    assert rows("grpo", reward_funcs=["liger_trainer.rewards:length"])["zip"][:] == ["007", None]


def test_a_file_that_has_changed_is_read_again(tmp_path):
    file = tmp_path / "a.jsonl"
    for text in ("aaaa", "bbbb longer"):
        file.write_text(json.dumps({"text": text}), encoding="utf-8")
        os.utime(file, (1e9, 1e9))
        assert load_files([str(file)], "data_files", bool)["text"][:] == [text]


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
