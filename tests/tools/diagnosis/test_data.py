"""Traps that the first rows of the data show, as the trainer makes them; the same with the fix has none."""

import json
import re

import pytest
from datasets import Dataset

from liger_trainer.recipe.file import RecipeError
from liger_trainer.tools.diagnosis import sample
from tests.tiny_models import TINY_MODELS
from tests.tools.cli.runs import write_recipe
from tests.tools.diagnosis.recipes import chats, data_file, found_in, model_folder, recipe, traps_of
from tests.trainers.tiny import CHAT_TEMPLATE, WORDS
from tests.trainers.vision import PROCESSORS, dialogues

pytestmark = pytest.mark.filterwarnings("ignore")

LONG = " ".join(WORDS * 3)
OUTSIDE = CHAT_TEMPLATE.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
)
ASKED = [{"prompt": "the cat sat ", "completion": "on the mat"}] * 8


def test_a_sound_recipe_has_none(tmp_path):
    found = found_in(recipe(tmp_path))
    assert found.traps == []
    assert not found.unchecked
    assert "labelled share" in " ".join(found.checked)
    assert "16 rows" in " ".join(found.checked)


def test_rows_of_a_recipe_for_a_gpu_are_looked_at_without_one(tmp_path):
    found = found_in(recipe(tmp_path, cuda_graphs=True))
    assert "16 rows" in " ".join(found.checked)


@pytest.mark.parametrize("packing", [False, True])
def test_answers_cut_off(packing, tmp_path):
    path = recipe(tmp_path, chats(12) + chats(4, answer=LONG), max_length=60, packing=packing)
    (trap,) = traps_of(path)
    assert "`max_length: 60` cuts the end off 4 of 16" in trap
    needed = trap.split("Fix: `max_length: ")[1].split("`")[0]
    assert traps_of(path, "--max_length", needed) == []
    assert any("cuts the end" in trap for trap in traps_of(path, "--max_length", str(int(needed) - 1)))


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_an_answer_that_is_learnt_against_its_weight(mark, tmp_path):
    rows = chats(4)
    rows[2]["messages"] = [*rows[2]["messages"][:1], {**rows[2]["messages"][1], **mark}, *rows[2]["messages"]]
    path = recipe(tmp_path, rows)
    assert traps_of(path) == []
    (trap,) = traps_of(path, "--assistant_only_loss", "false")
    assert "Some of the first 4 rows have an answer with `weight: 0` or `train: false`, learnt too" in trap


def test_rows_that_go_on_in_the_next_are_not_cut(tmp_path):
    path = recipe(tmp_path, chats(4, answer=LONG), max_length=60, packing=True, packing_strategy="bfd_split")
    assert traps_of(path) == []


def test_rows_left_out(tmp_path):
    rows = [*ASKED, {"prompt": LONG + " ", "completion": "on the mat"}]
    path = recipe(tmp_path, rows, max_length=40, assistant_only_loss=False, eos_token=None)
    (trap,) = traps_of(path)
    assert "1 of 9 rows are left out" in trap
    needed = trap.split("Fix: `max_length: ")[1].split("`")[0]
    assert traps_of(path, "--max_length", needed) == []


def test_rows_without_a_label(tmp_path):
    ids = [5, 6, 7, 2]
    rows = [{"input_ids": ids, "labels": ids}] * 6 + [{"input_ids": ids, "labels": [-100] * 4}] * 2
    path = recipe(tmp_path, rows, assistant_only_loss=False, eos_token=None)
    (trap,) = traps_of(path)
    assert "2 of 8 rows have no label" in trap
    data_file(tmp_path / "data.jsonl", rows[:6])
    assert traps_of(path) == []


def test_a_label_on_the_first_token_alone_is_none(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 2], "labels": [5, 6, 7, 2]}] * 6 + [{"input_ids": [5, 6], "labels": [5, -100]}]
    (trap,) = traps_of(recipe(tmp_path, rows, assistant_only_loss=False, eos_token=None))
    assert "1 of 7 sequences have no label" in trap


def test_few_labels(tmp_path):
    rows = [{"prompt": LONG * 20 + " ", "completion": "a"}] * 4
    path = recipe(tmp_path, rows, max_length=8192, assistant_only_loss=False, eos_token=None)
    (trap,) = traps_of(path)
    assert "% of the tokens have a label" in trap
    assert traps_of(path, "--completion_only_loss", "false") == []


@pytest.mark.parametrize("trainer", ["dpo", "kto", "orpo", "cpo"])
def test_alignment_trainers_answers_are_cut(trainer, tmp_path):
    pairs = [{"prompt": "the cat ", "chosen": LONG, "rejected": "a dog"}] * 8
    unpaired = [{"prompt": "the cat ", "completion": LONG, "label": bool(i % 2)} for i in range(8)]
    path = recipe(tmp_path, unpaired if trainer == "kto" else pairs, trainer=trainer, max_length=40)
    traps = traps_of(path)
    assert any("cuts the end off 8 of" in trap for trap in traps)
    assert traps_of(path, "--max_length", "512") == []


def test_a_reward_model_leaves_out_long_pairs(tmp_path):
    rows = [{"chosen": WORDS[0], "rejected": WORDS[1]}] * 4 + [{"chosen": LONG, "rejected": WORDS[1]}]
    path = recipe(tmp_path, rows, trainer="reward", max_length=40)
    (trap,) = traps_of(path)
    assert "1 of 5 rows are left out" in trap
    assert traps_of(path, "--max_length", "512") == []


@pytest.mark.parametrize(
    ("template", "values", "fix", "words"),
    [
        (OUTSIDE, {}, ["--assistant_only_loss", "false"], "'<|im_end|>', which ends an answer, is a label in 0 of 16"),
        (CHAT_TEMPLATE, {"eos_token": None}, ["--eos_token", "<|im_end|>"], "generation stops at '</s>'"),
        (
            CHAT_TEMPLATE.replace("'<|im_end|>'", "'\n'").replace("'<|im_start|>' + ", ""),
            {},
            ["--chat_template_path", "good.jinja"],
            "The chat template writes no token of its own after an answer",
        ),
    ],
    ids=["outside of the markers", "another eos", "no end"],
)
def test_no_end_is_learnt(template, values, fix, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jinja").write_text(CHAT_TEMPLATE)
    path = recipe(tmp_path, model=model_folder(tmp_path / "model", template), **values)
    (trap,) = traps_of(path)
    assert words in trap
    assert traps_of(path, *fix) == []


def test_the_models_own_stops_count(tmp_path):
    path = recipe(tmp_path, model=model_folder(tmp_path / "model", eos_token_id=[2, 4]), eos_token=None)
    assert traps_of(path) == []


def test_a_last_answer_may_have_an_end_of_its_own(tmp_path):
    """As in GPT-OSS, whose answers before another question end with a token at which generation does not stop."""
    own = CHAT_TEMPLATE.replace("'<|im_end|>'", "('</s>' if loop.last else '<|im_end|>')")
    assert own != CHAT_TEMPLATE
    assert traps_of(recipe(tmp_path, model=model_folder(tmp_path / "own", own), eos_token=None)) == []


def test_the_end_of_a_policys_answers(tmp_path):
    values = {"trainer": "grpo", "reward_funcs": ["liger_trainer.rewards:accuracy"], "system_prompt": "the cat"}
    rows = [{"prompt": "the cat", "solution": "sat"}]
    (trap,) = traps_of(recipe(tmp_path, rows, **values))
    assert "generation stops at '</s>'" in trap
    stops = model_folder(tmp_path / "other", eos_token_id=[2, 4])
    assert traps_of(recipe(tmp_path, rows, model=stops, **values)) == []


def test_blocks_of_text_need_some_end(tmp_path):
    rows = [{"text": LONG}] * 8
    path = recipe(tmp_path, rows, trainer="causal_lm", max_length=16)
    assert traps_of(path) == []


def test_the_first_rows_may_fill_no_block(tmp_path):
    path = recipe(tmp_path, [{"text": "a"}] * 300, trainer="causal_lm", max_length=2048)
    found = found_in(path)
    assert found.traps == []
    assert any("do not fill a block" in reason for reason in found.unchecked.values())
    data_file(tmp_path / "data.jsonl", [{"text": "a"}] * 200)
    with pytest.raises(RecipeError, match="shorter than one block"):
        found_in(path)


def test_two_beginnings(tmp_path):
    path = recipe(tmp_path, [{"text": f"<s><s>{WORDS[0]}"}] * 4, assistant_only_loss=False, eos_token=None)
    (trap,) = traps_of(path)
    assert "begin with '<s>' twice" in trap
    data_file(tmp_path / "data.jsonl", [{"text": f"<s>{WORDS[0]}"}] * 4)
    assert traps_of(path) == []


def test_image_tokens_as_labels(tmp_path):
    folder = str(tmp_path / "model")
    TINY_MODELS["gemma3"](max_position_embeddings=256).config.save_pretrained(folder)
    PROCESSORS["gemma3"]().save_pretrained(folder)
    file = tmp_path / "model" / "tokenizer_config.json"
    names = {"extra_special_tokens": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    rows = dialogues(8)
    asked = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:], "images": row["images"]} for row in rows
    ]
    Dataset.from_list(asked, features=None).save_to_disk(tmp_path / "asked")
    rows.save_to_disk(tmp_path / "chats")
    values = {"trainer": "sft", "model_name_or_path": folder, "eos_token": "<|im_end|>", "max_length": 256}
    path = write_recipe(tmp_path / "mine.yaml", {**values, "dataset_name": str(tmp_path / "chats")})
    (trap,) = traps_of(path)
    assert "labels are tokens that stand for an image" in trap
    assert traps_of(path, "--dataset_name", str(tmp_path / "asked"), "--completion_only_loss", "true") == []


def test_what_training_refuses_is_refused(tmp_path):
    path = recipe(tmp_path, [{"text": "the cat"}])  # with `assistant_only_loss`
    with pytest.raises(RecipeError, match="assistant_only_loss"):
        found_in(path)


@pytest.mark.parametrize("streamed", [False, True])
def test_only_the_first_rows_are_read(streamed, tmp_path, monkeypatch):
    path = recipe(tmp_path, chats(300))
    if streamed:
        monkeypatch.setattr(sample, "_can_stream", lambda: True)
        (tmp_path / "rows").mkdir()
        (tmp_path / "data.jsonl").rename(tmp_path / "rows" / "data.jsonl")
        values = {"trainer": "sft", "model_name_or_path": str(tmp_path / "model"), "eos_token": "<|im_end|>"}
        path = write_recipe(tmp_path / "mine.yaml", {**values, "dataset_name": str(tmp_path / "rows")})
    found = found_in(path)
    assert found.traps == []
    assert "first 256 rows" in " ".join(found.checked)


def test_a_recipe_without_data_is_refused(tmp_path):
    values = {"trainer": "sft", "model_name_or_path": model_folder(tmp_path / "model")}
    with pytest.raises(RecipeError, match="says nothing about data"):
        found_in(write_recipe(tmp_path / "mine.yaml", values))


def test_what_the_template_leaves_out(tmp_path):
    said = [{"role": "user", "content": WORDS[0]}, {"role": "assistant", "content": WORDS[1], "reasoning": WORDS[2]}]
    (trap,) = traps_of(recipe(tmp_path, [{"messages": said}] * 8))
    assert "The chat template leaves out `reasoning` (8 of 8) of the first 8 rows" in trap
    assert traps_of(recipe(tmp_path, chats())) == []


def test_pairs_of_the_same_answer(tmp_path):
    row = {"prompt": "the cat sat ", "chosen": "on the mat", "rejected": "in the cold"}
    same = {**row, "rejected": row["chosen"]}
    (trap,) = [trap for trap in traps_of(recipe(tmp_path, [row, same], trainer="dpo")) if "the same" in trap]
    assert "In 1 of 2 rows `chosen` and `rejected` are the same" in trap
    assert not any("the same" in trap for trap in traps_of(recipe(tmp_path, [row, row], trainer="dpo")))


def test_answers_with_one_label(tmp_path):
    good = {"prompt": "the cat sat ", "completion": "on the mat", "label": True}
    (trap,) = [trap for trap in traps_of(recipe(tmp_path, [good] * 4, trainer="kto")) if "`label` is" in trap]
    assert "`label` is true in all of the first 4 rows" in trap
    both = [good, {**good, "label": False}]
    assert not any("`label` is" in trap for trap in traps_of(recipe(tmp_path, both, trainer="kto")))


def test_prompts_that_leave_no_room_for_an_answer(tmp_path):
    values = {"trainer": "grpo", "reward_funcs": ["liger_trainer.rewards:accuracy"], "system_prompt": "the cat"}
    model = model_folder(tmp_path / "short", eos_token_id=[2, 4], max_position_embeddings=128)
    rows = [{"prompt": "the cat", "solution": "sat"}, {"prompt": LONG, "solution": "sat"}]
    path = recipe(tmp_path, rows, model=model, max_completion_length=60, **values)
    (trap,) = traps_of(path)
    words = re.search(r"A prompt of (\d+) tokens and `max_completion_length: 60` in a row", trap)
    assert words is not None
    longest = int(words[1])
    assert 128 - 60 < longest < 128
    assert traps_of(path, "--max_completion_length", str(128 - longest)) == []
    assert len(traps_of(path, "--max_completion_length", str(129 - longest))) == 1


def test_rows_without_a_limit_have_positions_too(tmp_path):
    model = model_folder(tmp_path / "short", max_position_embeddings=16)
    path = recipe(tmp_path, chats(answer=LONG), model=model)
    (trap,) = traps_of(path, "--max_length", "null")
    assert "tokens in a row, but llama has 16 positions" in trap


def test_prompts_that_the_template_changes_when_an_answer_follows(tmp_path):
    only_last = (
        "{% for m in messages %}{% if loop.last or m['role'] != 'user' %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
        "{% endfor %}"
    )
    rows = [
        {"prompt": [{"role": "user", "content": WORDS[0]}], "completion": [{"role": "assistant", "content": WORDS[1]}]}
    ]
    keys = {"assistant_only_loss": False, "eos_token": None}
    model = model_folder(tmp_path / "other", chat_template=only_last)
    found = traps_of(recipe(tmp_path, rows * 8, model=model, **keys))
    assert any("In 8 of 8 rows the chat template writes the prompt in another way" in trap for trap in found)
    assert not any("in another way" in trap for trap in traps_of(recipe(tmp_path, rows * 8, **keys)))
