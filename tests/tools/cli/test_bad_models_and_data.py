"""Models that cannot be trained and rows that cannot be read end in one message with exit code 2."""

import json
import socket
from pathlib import Path

import pytest
from datasets import Dataset

from liger_trainer.recipe import load_recipe
from liger_trainer.recipe.model import config_of_recipe
from liger_trainer.tools.cli import main
from tests.tools.cli.runs import TINY, refused, rows

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
BERT = {**TINY, "model_type": "bert"}
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def base(recipe):
    """Writes a recipe of a model in the folder `base`, whose config.json has `changes`."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from liger_trainer.recipe.smoke import train_tokenizer

    def write(settings=TINY, changes=None, **values):
        config = AutoConfig.for_model(**settings, vocab_size=300)
        kind = AutoModel if settings is BERT else AutoModelForCausalLM
        kind.from_config(config).save_pretrained("base")
        train_tokenizer(["a b c"], 300).save_pretrained("base")
        file = Path("base/config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **(changes or {})}))
        return recipe(model_config=None, tokenizer_vocab_size=None, model_name_or_path="base", **values)

    return write


@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"garbage!" * 99, lambda _: b""]
)
def test_damaged_weights(base, capsys, trainer, damage):
    file, path = Path("base/model.safetensors"), base(trainer=trainer)
    file.write_bytes(damage(file.read_bytes()))
    message = refused(capsys, path)
    assert "`model_name_or_path`: 'base': 'base/model.safetensors' is damaged or not a safetensors file: " in message


@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_quantised_weights_are_not_quantised_again(base, capsys, key, trainer):
    ints = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for settings, form in (({"quant_method": "fp8"}, "fp8"), (ints, "compressed-tensors pack-quantized")):
        path = base(trainer=trainer, changes={"quantization_config": settings}, use_peft=True, **{key: True})
        message = refused(capsys, path)
        assert message == (
            f"liger-trainer: {path}: `{key}` is true, but 'base' is quantised already ({form}). Leave `{key}` out, or "
            "give a checkpoint in 16 bits."
        )


def test_weights_of_bitsandbytes_may_be_named_so_again(base):
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path = base(changes={"quantization_config": settings}, use_peft=True, load_in_4bit=True)
    assert config_of_recipe(load_recipe(path)).quantization_config["load_in_4bit"]


def test_damaged_pickled_weights(base, capsys):
    path = base()
    Path("base/model.safetensors").unlink()
    Path("base/pytorch_model.bin").write_bytes(b"garbage" * 50)
    assert "the weights of 'base' cannot be read: a weights file is damaged" in refused(capsys, path)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "64"), ("num_attention_heads", 0)])
def test_sizes_that_are_not_counts(base, recipe, capsys, key, value):
    words = f"`{key}` is {value!r}; it must be a whole number, 1 or more."
    assert f"'base': {words}" in refused(capsys, base(changes={key: value}))
    assert f"`model_config`: {words}" in refused(capsys, recipe(model_config={**TINY, key: value}))


def test_sizes_that_contradict_each_other(base, capsys):
    message = refused(capsys, base(changes={"num_attention_heads": 3}))
    assert "'validate_architecture': ValueError: The hidden size (16) is not a multiple of" in message


@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
def test_encoders(base, recipe, capsys, trainer):
    words = "`model_type` 'bert' is an encoder, but this trainer needs a causal language model"
    assert words in refused(capsys, base(BERT, trainer=trainer))
    assert words in refused(capsys, recipe(model_config=BERT, trainer=trainer))
    message = refused(capsys, recipe(model_config={"model_type": "t5"}, trainer=trainer))
    assert "`model_type` 't5' is an encoder with a decoder, but this trainer needs" in message
    assert main(["plan", recipe(model_config=BERT), "--gpus", "1"]) == 2
    assert words in capsys.readouterr().err


def test_an_encoder_may_be_a_reward_model(recipe):
    pairs = rows(*[{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    changes = {"max_length": 32, "bf16": False, "gradient_checkpointing": False}
    assert main(["train", recipe(trainer="reward", model_config=BERT, data_files=pairs, **changes)]) == 0


def test_code_of_a_model_needs_its_key(base, capsys):
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path = base(changes={"model_type": "own_llama", "auto_map": own})
    Path("base/own.py").write_text(CODE)
    message = refused(capsys, path)
    assert "contains custom code" in message
    assert message.endswith("Read that code, and set `trust_remote_code: true` to run it.")
    assert main(["train", path, "--trust_remote_code", "true"]) == 0


def test_names_that_are_not_on_the_hub(recipe, capsys):
    message = refused(capsys, recipe(model_config=None, model_name_or_path="nobody/nothing"))
    assert "'nobody/nothing' cannot be loaded" in message
    assert "HF_TOKEN" in message
    message = refused(capsys, recipe(data_files=None, dataset_name="nobody/nothing"))
    assert "'nobody/nothing' cannot be loaded" in message


def test_the_hub_is_asked_once(recipe, capsys, monkeypatch):
    asked = []

    def nobody(*arguments, **options):
        asked.append(arguments)
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits"))
    message = refused(capsys, recipe(model_config=None, model_name_or_path="nobody/nothing"))
    assert "'nobody/nothing' cannot be loaded: the Hub cannot be reached: " in message
    assert len(asked) == 1


def test_a_smoke_run_of_a_broken_configuration(base, capsys):
    path = base()
    Path("base/config.json").write_text("{nope")
    assert "'base/config.json' is not a JSON object: " in refused(capsys, path, "--smoke")


LATIN = "café au lait"
FILES = {
    "data.xml": "<a/>",
    "broken.jsonl": '{"text": "a"\n{{{',
    "empty.jsonl": "",
    "null.jsonl": '{"text": "a"}\n{"text": null}\n',
    "number.jsonl": '{"text": "a"}\n{"text": "b"}\n{"text": 5}\n',
    **{f"latin.{kind}": f'{{"text": "{LATIN}"}}\n' * 9 for kind in ("jsonl", "json")},
    **{f"latin.{kind}": f"text\n{LATIN}\n" * 9 for kind in ("csv", "txt")},
}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("other.jsonl", "there is no file 'other.jsonl'"),
        ("data.xml", "give files of one kind: .json, .jsonl"),
        ("broken.jsonl", "['broken.jsonl'] cannot be read"),
        ("empty.jsonl", "`data_files`: 'empty.jsonl' is empty."),
        ("null.jsonl", "The column `text` is null in 1 rows"),
        ("number.jsonl", "The column `text` holds int, such as '5' in row 3, not text."),
        *((name, f"`data_files`: ['{name}'] cannot be read: ") for name in FILES if name.startswith("latin")),
    ],
)
def test_files_of_data(recipe, capsys, file, words):
    if file in FILES:
        Path(file).write_text(FILES[file], encoding="latin-1")
    message = refused(capsys, recipe(data_files=file))
    assert words in message
    assert message.endswith(" Save the text as UTF-8.") == file.startswith("latin")


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        ([{"text": 5}], {}, "The column `text` holds int, such as '5' in row 1, not text."),
        ([{"text": "a"}], {"dataset_text_field": "body"}, "has the columns text; `trainer: causal_lm` needs `body`"),
        (
            [{"question": "a"}],
            {"trainer": "sft", "bf16": False},
            "`messages` or `conversations` or `prompt` and `completion`",
        ),
        (
            [{"messages": "hello"}],
            {"trainer": "sft"},
            "The column `messages` holds str, such as 'hello' in row 1, not a list of turns",
        ),
        ([{"text": ""}] * 8, {"trainer": "sft"}, "no row has more than 1 token, so there is nothing to learn"),
        (
            [{"text": "a"}],
            {"test_split_size": 0.5, "eval_strategy": "steps", "eval_steps": 1},
            "`test_split_size` is 0.5, which cannot be taken from 1 rows: ",
        ),
    ],
)
def test_rows(recipe, capsys, data, changes, words):
    assert words in refused(capsys, recipe(data_files=rows(*data), **changes))


def test_labels_beyond_the_vocabulary(recipe, capsys):
    assert main(["train", recipe(output_dir="first")]) == 0
    ids = rows(*[{"input_ids": [5, 6, 9000], "labels": [5, 6, 9000]}] * 8)
    file = recipe(trainer="sft", data_files=ids, tokenizer_name_or_path="first", tokenizer_vocab_size=None)
    assert "`labels` holds 9000, and the model's vocabulary has 300 entries" in refused(capsys, file)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([USER, {"role": "assistant"}], "a turn without `content` ({'role': 'assistant'})"),
        ([{"content": "hi"}, ASSISTANT], "a turn without `role` ({'content': 'hi'})"),
        ([USER, {"role": "assistant", "content": 5}], "a turn whose `content` is int"),
        ([], "no turns"),
        (["hi", "yo"], "a list with str ('hi')"),
        ("hi", "str ('hi'), not a list of turns"),
    ],
)
@pytest.mark.parametrize("vocabulary", [300, None])
def test_a_malformed_conversation(base, capsys, values, words, vocabulary):
    file = base(trainer="sft", data_files=rows({"messages": [USER, ASSISTANT]}, {"messages": values}))
    message = refused(capsys, file, *(["--tokenizer_vocab_size", "300"] if vocabulary else []))
    assert f" holds {words}" in message
    assert "row 2" in message.lower()


def test_conversations_that_hold_more_than_words(recipe):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    theirs = [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]
    Path("plain.jinja").write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    changes = {"trainer": "sft", "bf16": False, "chat_template_path": "plain.jinja", "max_length": 64}
    conversations = [{"messages": [USER, call]}, {"messages": [USER, ASSISTANT]}] * 4
    assert main(["train", recipe(data_files=rows(*conversations), **changes)]) == 0
    shared = rows(*[{"conversations": theirs}] * 8)
    assert main(["train", recipe(data_files=shared, output_dir="other", **changes)]) == 0


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role }", "unexpected '}'."),
        ("{{ messages[0].role.x.y }}", "'str object' has no attribute 'x'."),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate."),
    ],
)
def test_a_chat_template_that_fails(recipe, capsys, template, words):
    Path("own.jinja").write_text(template)
    file = rows(*[{"messages": [USER, ASSISTANT]}] * 4)
    message = refused(capsys, recipe(trainer="sft", data_files=file, chat_template_path="own.jinja"))
    assert f"the chat template cannot be applied to the data: {words} It comes from `chat_template_path`" in message


@pytest.mark.parametrize("damage", ["cut short", "data missing", "state missing"])
def test_damaged_saved_data(recipe, capsys, damage):
    Dataset.from_list([{"text": "a b c"}] * 999).save_to_disk("saved")
    file = next(Path("saved").glob("*.arrow"))
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:4000])
    elif damage == "data missing":
        file.unlink()
    else:
        Path("saved/state.json").unlink()
    message = refused(capsys, recipe(data_files=None, dataset_name="saved"))
    assert "`dataset_name`: the folder 'saved' cannot be read: " in message
    assert message.endswith(" Save it again.")
