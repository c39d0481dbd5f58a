"""Models that cannot be trained and rows that cannot be read are told in one message with exit code 2."""

import json
import os
import socket
from pathlib import Path

import pytest
from datasets import Dataset

from liger_trainer.cli import main
from tests.cli.test_bad_input import TINY, recipe, refused, rows  # noqa: F401 (a fixture among them)

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
def base(recipe):  # noqa: F811
    """Writes a recipe of a model in the folder `base`, whose config.json has `changes`."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from liger_trainer.recipe.quickstart import train_tokenizer

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


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "64"), ("num_attention_heads", 0)])
def test_sizes_that_are_no_counts(base, recipe, capsys, key, value):  # noqa: F811
    words = f"`{key}` is {value!r}; it must be a whole number, 1 or more."
    assert f"'base': {words}" in refused(capsys, base(changes={key: value}))
    assert f"`model_config`: {words}" in refused(capsys, recipe(model_config={**TINY, key: value}))


def test_sizes_that_do_not_go_together(base, capsys):
    message = refused(capsys, base(changes={"num_attention_heads": 3}))
    assert "'validate_architecture': ValueError: The hidden size (16) is not a multiple of" in message


@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
def test_a_model_that_is_no_causal_one(base, recipe, capsys, trainer):  # noqa: F811
    words = "`model_type` 'bert' is an encoder, but this trainer needs a causal language model"
    assert words in refused(capsys, base(BERT, trainer=trainer))
    assert words in refused(capsys, recipe(model_config=BERT, trainer=trainer))
    message = refused(capsys, recipe(model_config={"model_type": "t5"}, trainer=trainer))
    assert "`model_type` 't5' is an encoder with a decoder, but this trainer needs" in message
    assert main(["plan", recipe(model_config=BERT), "--gpus", "1"]) == 2
    assert words in capsys.readouterr().err


def test_an_encoder_may_be_a_reward_model(recipe):  # noqa: F811
    pairs = rows(*[{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    changes = {"max_length": 32, "bf16": False, "gradient_checkpointing": False}
    assert main(["train", recipe(trainer="reward", model_config=BERT, data_files=pairs, **changes)]) == 0


def test_code_of_a_model_is_asked_for_by_its_key(base, capsys):
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path = base(changes={"model_type": "own_llama", "auto_map": own})
    Path("base/own.py").write_text(CODE)
    message = refused(capsys, path)
    assert "contains custom code" in message
    assert message.endswith("Read that code, and set `trust_remote_code: true` to run it.")
    assert main(["train", path, "--trust_remote_code", "true"]) == 0


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [("schedule_free_adamw", "You need to install `schedulefree`"), ("grokadamw", "Please install grokadamw")],
)
def test_an_optimizer_that_cannot_be_made(recipe, capsys, optimizer, words):  # noqa: F811
    assert words in refused(capsys, recipe(optim=optimizer))


def test_strict_kernels_say_which(recipe, capsys):  # noqa: F811
    asked = {"experts": True, "layer_norm": True}
    message = refused(capsys, recipe(strict_kernels=True, liger_kernel_config=asked))
    assert "experts: the model has nothing of the kind; layer_norm: the model has nothing of the kind. " in message
    assert message.endswith(
        "Switch them off in `liger_kernel_config`, or `strict` (in training arguments `strict_kernels`)."
    )


def test_logits_memory_without_a_unit(recipe, capsys):  # noqa: F811
    message = refused(capsys, recipe(logits_memory=1))
    assert "`logits_memory` is 1 bytes, but the logits of one token are 300 numbers of 2 bytes or more." in message
    assert main(["plan", recipe(logits_memory=1), "--gpus", "1"]) == 2
    assert "`logits_memory` is 1 bytes" in capsys.readouterr().err
    assert main(["train", recipe(logits_memory=2 * 300)]) == 0


def test_the_hub_is_asked_once(recipe, capsys, monkeypatch):  # noqa: F811
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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([USER, {"role": "assistant"}], "a turn without `content` ({'role': 'assistant'}) in row 1"),
        ([{"content": "hi"}, ASSISTANT], "a turn without `role` ({'content': 'hi'}) in row 1"),
        ([USER, {"role": "assistant", "content": 5}], "a turn whose `content` is int"),
        ([], "no turns in row 1"),
        (["hi", "yo"], "a list with str ('hi') in row 1"),
        ("hi", "The column `messages` holds str, such as 'hi' in row 1, not a list of turns"),
    ],
)
@pytest.mark.parametrize("vocabulary", [300, None])
def test_one_conversation_that_is_none(base, capsys, values, words, vocabulary):
    file = base(trainer="sft", data_files=rows({"messages": [USER, ASSISTANT]}, {"messages": values}))
    assert words in refused(capsys, file, *(["--tokenizer_vocab_size", "300"] if vocabulary else []))


def test_conversations_that_hold_more_than_words(recipe):  # noqa: F811
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    theirs = [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    Path("plain.jinja").write_text(template)
    changes = {"trainer": "sft", "bf16": False, "chat_template_path": "plain.jinja", "max_length": 64}
    conversations = [{"messages": [USER, call]}, {"messages": [USER, ASSISTANT]}] * 4
    assert main(["train", recipe(data_files=rows(*conversations), **changes)]) == 0
    shared = rows(*[{"conversations": theirs}] * 8)
    assert main(["train", recipe(data_files=shared, output_dir="other", **changes)]) == 0


def test_text_with_a_number_among_it(recipe, capsys):  # noqa: F811
    file = recipe(data_files=rows({"text": "a"}, {"text": "b"}, {"text": 5}))
    assert "The column `text` holds int, such as '5' in row 2, not text." in refused(capsys, file)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt"])
def test_text_that_is_not_utf_8(recipe, capsys, kind):  # noqa: F811
    row = '{"text": "café au lait"}\n' if kind.startswith("json") else "text\ncafé au lait\n"
    Path(f"latin.{kind}").write_bytes(row.encode("latin-1") * 9)
    message = refused(capsys, recipe(data_files=f"latin.{kind}"))
    assert f"`data_files`: ['latin.{kind}'] cannot be read: " in message
    assert message.endswith(" Save the text as UTF-8.")


@pytest.mark.parametrize("share", [1.0, -0.5, 5.0])
def test_a_share_of_the_data_that_is_none(recipe, capsys, share):  # noqa: F811
    message = refused(capsys, recipe(test_split_size=share, eval_strategy="steps", eval_steps=1))
    assert f"`test_split_size` is {share}; it must be a fraction of the data, 0 or more and below 1." in message


def test_too_few_rows_to_split(recipe, capsys):  # noqa: F811
    changes = {"test_split_size": 0.5, "eval_strategy": "steps", "eval_steps": 1}
    message = refused(capsys, recipe(data_files=rows({"text": "a"}), **changes))
    assert "`test_split_size` is 0.5, which cannot be taken from 1 rows: " in message


def test_values_that_no_run_can_mean(recipe, capsys):  # noqa: F811
    for key in ("seed", "data_seed"):
        assert f"`{key}` is -1; it must be from 0 to 4294967295." in refused(capsys, recipe(**{key: -1}))
    for key, value in {"adam_epsilon": -1.0, "neftune_noise_alpha": -3.0, "dataloader_num_workers": -1}.items():
        assert f"`{key}` is {value}; it must be 0 or more." in refused(capsys, recipe(**{key: value}))
    assert "`adam_beta1` is 2.0; it must be 0 or more and below 1." in refused(capsys, recipe(adam_beta1=2.0))
    smoothed = refused(capsys, recipe(label_smoothing_factor=2.0))
    assert "`label_smoothing_factor` is 2.0; it must be from 0 to 1." in smoothed
    assert "`max_length` is 1; it must be 2 or more." in refused(capsys, recipe(max_length=1))
    assert "cannot be created: File name too long; give another one." in refused(capsys, recipe(output_dir="x" * 300))


def test_a_key_that_is_a_list(recipe, capsys):  # noqa: F811
    path = Path(recipe())
    path.write_text(f"{path.read_text()}? [a, b]\n: 3\n")
    assert ", column 3: while constructing a mapping, found unhashable key." in refused(capsys, str(path))


@pytest.mark.parametrize("spelling", [{"fsdp": True}, {"fsdp": "full_shard"}, {"fsdp": ["full_shard"]}])
def test_fsdp_as_transformers_has_it(recipe, capsys, monkeypatch, spelling):  # noqa: F811
    monkeypatch.setattr(os, "environ", dict(os.environ))  # where transformers tells accelerate
    words = "Using fsdp only works in distributed training."
    assert words in refused(capsys, recipe(**spelling))
    assert words in refused(capsys, recipe(), "--fsdp", "true")
    assert main(["train", recipe(fsdp=False)]) == 0


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("cosine_with_min_lr", None, "One of min_lr or min_lr_rate should be set"),
        ("cosine", {"min_lr": 0.5}, "got an unexpected keyword argument 'min_lr'"),
    ],
)
def test_a_schedule_that_cannot_be_made(recipe, capsys, kind, options, words):  # noqa: F811
    message = refused(capsys, recipe(lr_scheduler_type=kind, lr_scheduler_kwargs=options))
    assert f"`lr_scheduler_type: {kind}` cannot be used with `lr_scheduler_kwargs` {options}: " in message
    assert words in message


@pytest.mark.parametrize("kind", ["linear", "constant", "inverse_sqrt", "reduce_lr_on_plateau", "polynomial"])
def test_schedules_that_need_no_options(recipe, kind):  # noqa: F811
    changes = {"eval_strategy": "steps", "eval_steps": 1, "test_split_size": 0.2}
    assert main(["train", recipe(lr_scheduler_type=kind, **changes)]) == 0


def test_optimizer_arguments_that_are_no_pairs(recipe, capsys):  # noqa: F811
    message = refused(capsys, recipe(optim_args="beta1"))
    assert "`optim_args` is 'beta1'; it must be pairs such as 'beta1=0.9, beta2=0.95'." in message


def test_a_metric_that_no_evaluation_has(recipe, capsys):  # noqa: F811
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "test_split_size": 0.2}
    message = refused(capsys, recipe(metric_for_best_model="nope", **changes))
    assert "mine.yaml: The `metric_for_best_model` training argument is set to 'eval_nope', which is not" in message


def test_data_that_do_not_make_a_batch(recipe, capsys):  # noqa: F811
    message = refused(capsys, recipe(per_device_train_batch_size=10**6, dataloader_drop_last=True))
    assert "`per_device_train_batch_size` is 1000000, and `dataloader_drop_last` true." in message
    assert not Path("run/model.safetensors").exists()


def test_an_error_of_several_lines_is_one(recipe, capsys):  # noqa: F811
    message = refused(capsys, recipe(load_best_model_at_end=True, save_strategy="steps"))
    assert "requires the save and eval strategy to match" in message
    assert "Save strategy: SaveStrategy.STEPS" in message


@pytest.mark.parametrize("data_seed", [0, None])
def test_rows_for_the_evaluation_are_drawn_by_data_seed(recipe, monkeypatch, data_seed):  # noqa: F811
    from datasets import Dataset

    seeds, split = [], Dataset.train_test_split
    monkeypatch.setattr(
        Dataset, "train_test_split", lambda *a, seed, **k: seeds.append(seed) or split(*a, seed=seed, **k)
    )
    changes = {"eval_strategy": "steps", "eval_steps": 1, "test_split_size": 0.2, "max_steps": 1}
    assert main(["train", recipe(seed=3, data_seed=data_seed, **changes)]) == 0
    assert seeds == [3 if data_seed is None else 0]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role }", "unexpected '}'."),
        ("{{ messages[0].role.x.y }}", "'str object' has no attribute 'x'."),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate."),
    ],
)
def test_a_chat_template_that_fails(recipe, capsys, template, words):  # noqa: F811
    Path("own.jinja").write_text(template)
    file = rows(*[{"messages": [USER, ASSISTANT]}] * 4)
    message = refused(capsys, recipe(trainer="sft", data_files=file, chat_template_path="own.jinja"))
    assert f"the chat template cannot be applied to the data: {words} It comes from `chat_template_path`" in message


def test_a_name_with_a_nul(recipe, capsys):  # noqa: F811
    assert "cannot be created: embedded null byte; give another one." in refused(capsys, recipe(output_dir="a\0b"))


def test_rows_without_a_second_token(recipe, capsys):  # noqa: F811
    message = refused(capsys, recipe(trainer="sft", data_files=rows(*[{"text": ""}] * 8)))
    assert "no row has more than 1 token, so there is nothing to learn" in message


@pytest.mark.parametrize("damage", ["cut", "gone", "no folder of data"])
def test_saved_data_that_is_damaged(recipe, capsys, damage):  # noqa: F811
    Dataset.from_list([{"text": "a b c"}] * 999).save_to_disk("saved")
    file = next(Path("saved").glob("*.arrow"))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:4000])
    elif damage == "gone":
        file.unlink()
    else:
        Path("saved/state.json").unlink()
    message = refused(capsys, recipe(data_files=None, dataset_name="saved"))
    assert "`dataset_name`: the folder 'saved' cannot be read: " in message
    assert message.endswith(" Save it again.")


def test_pickled_weights_that_are_damaged(base, capsys):
    path = base()
    Path("base/model.safetensors").unlink()
    Path("base/pytorch_model.bin").write_bytes(b"garbage" * 50)
    assert "the weights of 'base' cannot be read: a weights file is damaged" in refused(capsys, path)


def test_a_smoke_run_of_a_broken_configuration(base, capsys):
    path = base()
    Path("base/config.json").write_text("{nope")
    assert "'base/config.json' is not a JSON object: " in refused(capsys, path, "--smoke")
