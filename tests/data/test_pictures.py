"""Pictures where the text marks their places, as a trainer takes them and as the model sees them."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from liger_trainer.data.pictures import at_marks
from liger_trainer.data.shapes import ShapeError
from liger_trainer.recipe.load import check_values
from liger_trainer.tools.cli import main
from liger_trainer.tools.diagnosis.sample import converted_rows
from tests.tiny_models import TINY_MODELS
from tests.tools.cli.runs import write_recipe
from tests.trainers.vision import PROCESSORS

pytestmark = pytest.mark.filterwarnings("ignore")

PICTURE = {"type": "image"}


def says(role, content):
    return {"role": role, "content": content}


def text(words):
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("<image>\nWhat?", [PICTURE, text("\nWhat?")]),
        ("What? <image>", [text("What? "), PICTURE]),
        ("One <image><image> two", [text("One "), PICTURE, PICTURE, text(" two")]),
        ([text("This <image>?"), PICTURE], [text("This "), PICTURE, text("?"), PICTURE]),
        ([{**text("<image>?"), "image": None}], [PICTURE, text("?")]),
    ],
)
def test_a_picture_stands_where_its_mark_is(content, parts):
    count = parts.count(PICTURE)
    row = {"messages": [says("user", content), says("assistant", "A cat.")], "images": ["a.png"] * count}
    made = [says("user", parts), says("assistant", [text("A cat.")])]
    assert at_marks(row) == {"messages": made}
    again = [*row["messages"], *row["messages"]]
    assert at_marks({"messages": again, "images": ["a.png"] * 2 * count}) == {"messages": [*made, *made]}
    pair = {"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": row["messages"][1:]}
    assert at_marks({**pair, "images": row["images"]}) == {"prompt": made[:1], "chosen": made[1:], "rejected": made[1:]}


def test_rows_without_a_mark_stay():
    row = {"messages": [says("user", "What?"), says("assistant", "A cat.")], "images": ["a.png"]}
    assert at_marks(row) == {"messages": row["messages"]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [says("user", "<image><image>?")], "images": ["a.png"]}, r"text: 2, pictures in `images`: 1\."),
        ({"messages": [says("user", "<image>?")], "images": []}, r"text: 1, pictures in `images`: 0\. Give a mark for"),
        ({"messages": [says("user", "<image>?")], "images": ["a", "b"]}, "text: 1, pictures in `images`: 2"),
        ({"prompt": [says("user", "?")], "completion": [says("assistant", "<image>")], "images": ["a"]}, "'assistant'"),
        ({"prompt": "<image>?", "completion": "A cat.", "image": "a.png"}, "Plain text marks the place of a picture"),
        ({"text": "<image>?", "image": "a.png"}, "Plain text marks the place of a picture"),
    ],
)
def test_marks_that_fit_no_picture_are_refused(row, words):
    with pytest.raises(ShapeError, match=words):
        at_marks(row)


SEEN = [
    {
        "conversations": [
            {"from": "human", "value": "the <image> cat"},
            {"from": "gpt", "value": "sat"},
            {"from": "human", "value": "<image> dog"},
            {"from": "gpt", "value": "ran"},
        ],
        "image": ["red.png", "blue.png"],
    },
    {"conversations": [{"from": "human", "value": "birds"}, {"from": "gpt", "value": "fly"}], "image": None},
]


@pytest.fixture
def seen(tmp_path):
    """A file of LLaVA's shape, with two pictures beside it and a row without one."""
    for name, colour in (("red.png", (255, 0, 0)), ("blue.png", (0, 0, 255))):
        Image.new("RGB", (16, 16), colour).save(tmp_path / name)
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, SEEN)), encoding="utf-8")
    return tmp_path / "seen.jsonl"


def test_the_model_sees_each_picture_in_its_place(seen):
    written = {"trainer": "sft", "data_files": [str(seen)], "model_name_or_path": ""}
    rows = list(converted_rows(check_values(written, [], seen)[0], seen))
    processor = PROCESSORS["qwen2_vl"]()
    batch = DataCollatorForVisionLanguageModeling(processor)(rows)
    pictures = ["<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"] * 2
    shown = processor.tokenizer.decode(batch["input_ids"][0])
    between = shown.split(pictures[0])
    assert len(between) == 3
    assert [each in between[place] for place, each in ((0, "the"), (1, "cat"), (1, "sat"), (2, "dog"))] == [True] * 4
    assert "cat" not in between[0]
    first, second = batch["pixel_values"].view(2, -1, 3, 2, 16).mean((1, 3, 4))  # red comes first
    assert first[0] > first[2]
    assert second[2] > second[0]


def test_the_line_says_where_pictures_go(seen, capsys, caplog):
    assert main(["data", str(seen)]) == 0
    assert "`messages` (human → user, gpt → assistant), pictures at the marks `<image>`." in caplog.text
    assert "user: the [image] cat" in capsys.readouterr().out
    rows = [{**SEEN[0], "image": ["red.png"]}]
    seen.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["data", str(seen)]) == 2
    assert "Row 1 of the data: Marks '<image>' in the text: 2, pictures in `images`: 1." in capsys.readouterr().err


def test_one_picture_a_row_by_another_name(seen, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [says("user", "<image>?"), says("assistant", "A cat.")], "picture": "red.png"}]
    seen.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["data", str(seen), "--columns", '{"images": "picture"}']) == 2
    assert "one picture a row is `image`." in capsys.readouterr().err
    assert main(["data", str(seen), "--columns", '{"image": "picture"}']) == 0
    assert "user: [image]?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [says("user", [{"type": "image_url", "image_url": {"url": "a"}}]), says("assistant", "A")]},
            "Row 1 of the data: A conversation holds a part of type 'image_url', which the model would not see; give",
        ),
        (
            {"messages": [says("user", [{"type": "image", "image": "a.png"}]), says("assistant", "A")]},
            "a part of type 'image', which",
        ),
        *(
            (
                {"messages": [says("user", [part]), says("assistant", "A")], "image": "https://a"},
                f"{part['type']!r}, which",
            )
            for part in (
                {"type": "video", "video": "a.mp4"},
                {"type": "audio", "audio": "a.wav"},
                {"type": "image_url", "image_url": {"url": "a"}},
                {"type": "image", "image": "a.png"},
                {"type": "image", "url": "a.png"},
            )
        ),
        (
            {"messages": [says("user", "<video>?"), says("assistant", "A")], "videos": ["a.mp4"]},
            "The data has `videos`, which no trainer reads",
        ),
        (
            {"messages": [says("user", "?"), says("assistant", "A")], "videos": ["a.mp4"]},
            "The data has `videos`, which no trainer reads",
        ),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "A"}], "video": "a.mp4"},
            "The data has `video`, which no trainer reads",
        ),
    ],
)
def test_what_the_model_would_not_see_is_refused(row, words, tmp_path, capsys):
    (tmp_path / "unseen.jsonl").write_text(json.dumps(row), encoding="utf-8")
    assert main(["data", str(tmp_path / "unseen.jsonl")]) == 2
    assert words in capsys.readouterr().err


def test_a_recipe_trains_on_them(seen, tmp_path):
    folder = str(tmp_path / "model")
    TINY_MODELS["gemma3"](max_position_embeddings=256).save_pretrained(folder)
    PROCESSORS["gemma3"]().save_pretrained(folder)
    file = tmp_path / "model" / "tokenizer_config.json"
    names = {"extra_special_tokens": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    values = {"trainer": "sft", "model_name_or_path": folder, "data_files": [str(seen)], "max_length": None}
    more = {"max_steps": 1, "use_cpu": True, "report_to": "none", "bf16": False, "dtype": "float32"}
    recipe = write_recipe(tmp_path / "mine.yaml", {**values, **more, "output_dir": str(tmp_path / "out")})
    assert main(["train", str(recipe), "--per_device_train_batch_size", "1"]) == 0
