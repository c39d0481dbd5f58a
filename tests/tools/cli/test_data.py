"""`liger-trainer data`, and recipes on data of other shapes."""

import json
import re
from pathlib import Path

import pytest

from liger_trainer.cli import main
from tests.tools.cli.runs import write_recipe
from tests.tools.diagnosis.recipes import model_folder
from tests.trainers.tiny import WORDS

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAREGPT = {"conversations": [{"from": "human", "value": WORDS[0]}, {"from": "gpt", "value": WORDS[1]}], "id": "7"}
ORCA = {"system": WORDS[2], "question": WORDS[0], "chosen": WORDS[1], "rejected": WORDS[3]}
ROLES = ("user", "assistant")
ALPACA = {"instruction": WORDS[0], "input": "", "output": WORDS[1]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", chat_template=PLAIN)
    return tmp_path


def write(name, row, count=8):
    Path(name).write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    return name


def shown(capsys, *arguments):
    assert main(["data", *arguments]) == 0
    return capsys.readouterr().out


def test_tokens_and_labels(folder, capsys):
    out = shown(capsys, write("a.jsonl", SHAREGPT), "--model", "model", "--assistant_only_loss", "true", "--rows", "2")
    assert out.count("<|im_start|>assistant") == 2
    assert re.search(r"Row 2: \d+ tokens, \d+ labels", out)
    assert "8 rows, 7 of them duplicates, 0 with an empty answer." in out
    assert "`max_length: 1024` cuts 0 of 8 sequences." in out


def test_both_answers_of_a_pair(folder, capsys):
    out = shown(capsys, write("a.jsonl", ORCA), "--model", "model", "--trainer", "dpo", "--rows", "1")
    assert re.search(r"Row 1, chosen: .*Row 1, rejected: ", out, re.DOTALL)


def test_rows_without_a_model(folder, capsys):
    out = shown(capsys, write("a.jsonl", {**ALPACA, "output": " "}))
    assert f"prompt · user: {WORDS[0]}" in out
    assert "8 with an empty answer" in out
    assert "`--model MODEL` shows tokens and labels." in out


def test_conversations_without_an_answer_and_tools_are_shown(folder, capsys):
    talk = [*SHAREGPT["conversations"], {"from": "human", "value": "more?"}]
    out = shown(capsys, write("a.jsonl", {"conversations": talk, "tools": [{"name": "search"}]}, 3))
    assert "3 conversations end without an answer." in out
    assert 'tools: [{"name": "search"}]' in out
    assert "without an answer" not in shown(capsys, write("b.jsonl", SHAREGPT))


def test_a_recipe_and_its_data(folder, capsys):
    keys = {"trainer": "sft", "model_name_or_path": "model", "data_files": write("a.jsonl", ALPACA), "max_length": 25}
    out = shown(capsys, write_recipe(folder / "mine.yaml", {**keys, "output_dir": "run"}))
    assert "`max_length: 25` cuts 8 of 8 sequences." in out


def test_a_page_with_colours(folder, capsys):
    file = write("a.jsonl", SHAREGPT)
    shown(capsys, file, "--model", "model", "--html", "page.html")
    page = Path("page.html").read_text()
    assert "green" in page or "#008000" in page
    assert WORDS[1] in page
    assert main(["data", file, "--model", "model", "--html", "page.html"]) == 2
    assert "`--html` is 'page.html', which is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl"], "`data_files`: there is no file 'none.jsonl'"),
        (["mine.yaml", "more.jsonl"], "'mine.yaml' is a recipe, which names its data; give it alone"),
        (["a.jsonl", "--columns", '{"messages": "talk"}'], "`columns` names 'talk'"),
    ],
)
def test_mistakes(folder, capsys, arguments, words):
    write("a.jsonl", SHAREGPT)
    assert main(["data", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("liger-trainer: ")]
    assert words in line


def train(folder, trainer, row, **keys):
    base = {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no", "loss_curve": False}
    model = {"model_config": {"model_type": "llama", **json.loads(Path("model/config.json").read_text())}}
    values = {"trainer": trainer, "data_files": write("data.jsonl", row), "output_dir": "run", **base, **model}
    path = write_recipe(folder / "mine.yaml", {**values, "tokenizer_name_or_path": "model", **keys})
    return main(["train", path])


@pytest.mark.parametrize(
    ("trainer", "row", "line"),
    [
        ("sft", SHAREGPT, "`conversations` → `messages` (human → user, gpt → assistant); not used: `id`."),
        ("sft", ALPACA, "`instruction`, `input`, `output` → `prompt`, `completion`, as a conversation."),
        (
            "dpo",
            ORCA,
            "`system`, `question`, `chosen`, `rejected` → `prompt`, `chosen`, `rejected`, as a",
        ),
        (
            "kto",
            {**SHAREGPT, "label": True},
            "`conversations`, `label` → `prompt`, `completion`, `label` (",
        ),
    ],
)
def test_data_of_other_shapes_trains_and_says_how_it_is_read(folder, caplog, trainer, row, line):
    assert train(folder, trainer, row) == 0
    assert f"Data: {line}" in caplog.text


def test_what_the_chat_template_leaves_out_is_said_once(folder, caplog):
    turns = [{"role": "user", "content": WORDS[0]}, {"role": "assistant", "content": WORDS[1], "thinking": WORDS[2]}]
    assert train(folder, "sft", {"messages": turns, "tools": '[{"name": "search"}]'}) == 0
    line = "the chat template leaves out `tools` (8 of 8), `thinking` (8 of 8) of the first 8 rows"
    assert caplog.text.count(line) == 1


def test_an_unknown_role_is_one_line_with_the_row(folder, capsys):
    talk = {"conversations": [{"from": "narrator", "value": "it was"}, *SHAREGPT["conversations"]]}
    assert train(folder, "sft", talk) == 2
    assert (
        "Row 1 of the data: A conversation holds a turn of 'narrator', which names none of the roles"
        in capsys.readouterr().err
    )
    assert train(folder, "sft", talk, roles={"narrator": "system"}) == 0


def test_samples_of_a_model_of_conversations_are_answers_to_a_question(folder, capfd, monkeypatch):
    import transformers

    seen = []
    pipeline = transformers.pipeline

    def listening(*arguments, **options):
        made = pipeline(*arguments, **options)

        def generate(prompt, **settings):
            seen.append(prompt)
            return made(prompt, **settings)

        return generate

    monkeypatch.setattr("liger_trainer.recipe.output.pipeline", listening)
    assert train(folder, "sft", SHAREGPT, sample_prompts=[WORDS[0]], sample_tokens=2) == 0
    assert train(folder, "sft", {"text": WORDS[0]}, sample_prompts=[WORDS[0]], sample_tokens=2, output_dir="text") == 0
    assert seen == [[{"role": "user", "content": WORDS[0]}], WORDS[0]]
    assert WORDS[0] in capfd.readouterr().out


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"title": "a", "body": "b"},
            'Say which is what with `columns`, such as {"prompt": "title", "completion": "body"}',
        ),
        ({"items": SHAREGPT["conversations"], "id": "7"}, 'holds conversations with `columns`: {"messages": "items"}.'),
        ({"question;answer": "q;a"}, "Its columns are separated by ';'; save the table with commas"),
        ({"instruction": "a"}, "Use other data, or add the missing columns."),
        ({"body": "b"}, "Set `dataset_text_field` to the column that holds the text, such as 'body'."),
    ],
)
def test_columns_that_say_nothing_are_refused_with_what_leads_on(folder, capsys, row, words):
    assert train(folder, "sft", row) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_parts_of_text_are_trained_as_their_text(folder, capsys, trainer):
    text = [{"type": "text", "text": word} for word in WORDS[:2]]
    asked, answer = ({"role": role, "content": text[place : place + 1]} for place, role in enumerate(ROLES))
    row = {"messages": [asked, answer]} if trainer == "sft" else {"prompt": [asked], "chosen": [answer]}
    row |= {} if trainer == "sft" else {"rejected": [{"role": "assistant", "content": WORDS[3]}]}
    out = shown(capsys, write("a.jsonl", row), "--model", "model", "--trainer", trainer, "--rows", "1")
    assert f"user{WORDS[0]}<|im_end|>" in out
    assert f"assistant{WORDS[1]}<|im_end|>" in out


def test_functions_are_tools(folder, capsys, caplog):
    talk = [{"role": "user", "content": WORDS[0]}, {"role": "assistant", "content": WORDS[1]}]
    out = shown(capsys, write("a.jsonl", {"messages": talk, "functions": [{"name": "search"}]}))
    assert 'tools: [{"name": "search"}]' in out
    assert "Data: `functions` → `tools`." in caplog.text


def test_adapters_on_the_embedding(folder):
    assert train(folder, "sft", SHAREGPT, use_peft=True, lora_target_modules=["q_proj", "embed_tokens"]) == 0


def test_how_data_is_read_is_said_once(folder, caplog):
    write("more.jsonl", ALPACA)
    assert train(folder, "sft", ALPACA, eval_data_files="more.jsonl", eval_strategy="epoch") == 0
    assert caplog.text.count("Data: `instruction`") == 1


@pytest.mark.parametrize("assistant_only_loss", [True, False])
def test_a_second_run_reads_the_cache(folder, monkeypatch, assistant_only_loss):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    keys = {"assistant_only_loss": assistant_only_loss, "overwrite_output_dir": True}
    assert train(folder, "sft", SHAREGPT, **keys) == 0
    before = sorted((folder / "cache").rglob("cache-*"))
    assert before
    assert main(["train", "mine.yaml"]) == 0
    assert sorted((folder / "cache").rglob("cache-*")) == before
    assert main(["train", "mine.yaml", "--max_length", "32"]) == 0
    assert len(sorted((folder / "cache").rglob("cache-*"))) > len(before)


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        (["user"] * 100 + ["human"], {}, "a turn that names its role in another way than the first rows do"),
        ([*["user"] * 100, "parts"], {}, "Row 101 of the data: the column `messages` holds a turn whose `content` is"),
        (["user"], {"prompt_template": "T: {messages}"}, "`messages` holds conversations; leave it out"),
        (["user"], {"roles": {"narrator": "sytem"}}, "`roles` says that 'narrator' is 'sytem'; it must be one of"),
        (["user"], {"columns": {"a": "messages", "b": "messages"}}, "`columns` takes 'messages' for several columns"),
    ],
)
def test_mistakes_that_would_train_silently(folder, capsys, rows, keys, words):
    parts = {"role": "user", "content": [{"type": "text", "text": WORDS[0]}]}
    asked = [parts if role == "parts" else {"role": role, "content": WORDS[0]} for role in rows]
    talks = [[turn, {"role": "assistant", "content": WORDS[1]}] for turn in asked]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert train(folder, "sft", SHAREGPT, data_files="talks.jsonl", **keys) == 2
    assert words in capsys.readouterr().err


def test_a_first_row_without_an_answer(folder, capsys):
    Path("rows.jsonl").write_text('{"question": "q", "answer": null}\n{"question": "q", "answer": "a"}\n')
    assert train(folder, "sft", SHAREGPT, data_files="rows.jsonl") == 2
    assert "The column `completion` is null in 1 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "row", "keys", "words"),
    [
        ("sft", {"text": "a"}, {"prompt_template": "{text}!"}, "none of the columns text is an answer to the prompt"),
        ("sft", {"text": "a"}, {"system_prompt": "be"}, "`system_prompt` is given, but the data is text or tokens"),
        ("causal_lm", {"text": "a"}, {"system_prompt": "be"}, "but `trainer: causal_lm` trains on plain text"),
        ("causal_lm", {"text": "a"}, {"prompt_template": "{text}!"}, "but `trainer: causal_lm` trains on plain text"),
        ("causal_lm", {"text": "a"}, {"roles": {"a": "user"}}, "but `trainer: causal_lm` trains on plain text"),
    ],
)
def test_keys_for_other_data_are_refused(folder, capsys, trainer, row, keys, words):
    assert train(folder, trainer, row, **keys) == 2
    assert words in capsys.readouterr().err
