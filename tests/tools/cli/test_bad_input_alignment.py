"""A mistake in a recipe of an alignment trainer ends in one message with exit code 2."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from liger_trainer.tools.cli import main
from tests.tools.cli.runs import TINY, refused, rows

PAIR = {"prompt": "a b", "chosen": "c", "rejected": "d"}
COMPLETION = {"prompt": "a", "completion": "b"}
TURNS = [{"role": "assistant", "content": "c"}]
LENGTH = "liger_trainer.rewards:length"
SUM = {"question": "one and one", "result": "2"}
REWARDS = """
def crash(completions, result, **columns):
    return [1 / (int(value) - 2) for value in result]

def short(completions, **columns):
    return [1.0]

def strict(completions, gold, **columns):
    return [1.0] * len(completions)

def narrow(completions):
    return [1.0] * len(completions)

def silent(completions, **columns):
    return [None] * len(completions)

NUMBER = 3
"""


@pytest.fixture
def aligned(recipe, monkeypatch):
    """Writes a recipe of a trainer on equal rows, or on these, and gives its path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    Path("my_rewards.py").write_text(REWARDS)
    Path("broken_rewards.py").write_text("import no_such_package\n")
    Path("leaving_rewards.py").write_text("import sys\nsys.exit()\n")

    def write(trainer, row, **changes):
        values = {"max_length": None, "max_steps": 1, "bf16": False, "gradient_checkpointing": False}
        if trainer in ("grpo", "rloo"):
            values |= {"num_generations": 2, "max_completion_length": 2, "per_device_train_batch_size": 2}
            values |= {"columns": {"prompt": "question"}, "reward_funcs": ["my_rewards:crash"]}
        data = rows(*(row if isinstance(row, list) else [row] * 8))
        return recipe(trainer=trainer, data_files=data, kernel_report=False, **{**values, **changes})

    return write


@pytest.mark.parametrize(
    ("trainer", "known"),
    [
        ("dpo", "'sigmoid', 'hinge'"),
        ("grpo", "'grpo', 'dr_grpo'"),
        ("kto", "'kto', 'apo_zero_unpaired'"),
        ("cpo", "'ipo', 'simpo'"),
    ],
)
def test_unknown_loss_type(aligned, capsys, trainer, known):
    message = refused(capsys, aligned(trainer, PAIR, loss_type="sigmoidal"))
    for words in ("`loss_type` is", "sigmoidal", known):
        assert words in message


@pytest.mark.parametrize(
    ("trainer", "needed"),
    [
        *((trainer, "`chosen` and `rejected`") for trainer in ("dpo", "orpo", "cpo", "reward")),
        ("kto", "`prompt` and `completion` and `label` or `chosen` and `rejected`"),
        ("grpo", "`prompt`"),
        ("rloo", "`prompt`"),
    ],
)
def test_missing_columns(aligned, capsys, trainer, needed):
    message = refused(capsys, aligned(trainer, {"title": "a", "good": "b"}, columns=None))
    assert f"The data has the columns title, good; `trainer: {trainer}` needs {needed}. " in message
    assert '"title"}' in message


def test_columns_of_different_kinds(aligned, capsys):
    message = refused(capsys, aligned("dpo", {**PAIR, "chosen": [{"role": "user", "content": "a b"}, *TURNS]}))
    assert "Row 1 of the data: One of `chosen` and `rejected` is a conversation, and the other an answer" in message
    message = refused(capsys, aligned("kto", {"prompt": "a", "completion": "b", "label": "perhaps"}))
    assert "The column `label` holds 'perhaps'; it must hold true or false." in message


def test_rows_of_two_kinds(aligned, capsys):
    message = refused(capsys, aligned("dpo", [PAIR, {**PAIR, "chosen": TURNS}]))
    assert "Row 2 of the data: The column `chosen` holds turns, and the prompt is text; make both the same." in message
    whole = {name: [{"role": "user", "content": "a b"}, *TURNS] for name in ("chosen", "rejected")}
    message = refused(capsys, aligned("dpo", [PAIR, {**PAIR, **whole}]))
    assert "Row 2 of the data becomes `chosen`, `rejected`, and the rows before it `prompt`, `chosen`" in message
    message = refused(capsys, aligned("dpo", [PAIR, {**PAIR, "prompt": whole["chosen"]}]))
    assert "The column `prompt` holds str in row 1 and list in row 2" in message
    labels = [{"prompt": "a", "completion": "b", "label": label} for label in (0, 1, 2)]
    message = refused(capsys, aligned("kto", labels))
    assert "The column `label` holds [0, 1, 2]; it must hold true or false." in message


def test_pairs_without_a_common_prompt(aligned, capsys):
    pair = {name: [{"role": "user", "content": name}, *TURNS] for name in ("chosen", "rejected")}
    message = refused(capsys, aligned("dpo", pair))
    assert "Row 1 of the data: `chosen` and `rejected` begin with different turns" in message


def test_evaluation_data_without_renamed_columns_is_read_as_it_is(aligned, capsys):
    Path("evaluated.jsonl").write_text(json.dumps(PAIR) + "\n")
    more = {"eval_data_files": "evaluated.jsonl", "eval_strategy": "steps"}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert main(["train", aligned("dpo", {"question": "a b", "good": "c", "bad": "d"}, columns=columns, **more)]) == 0


def test_tools_that_are_no_schemas(aligned, capsys):
    message = refused(capsys, aligned("dpo", {**PAIR, "tools": "get_weather(city)"}))
    assert "The column `tools` holds 'get_weather(city)' in row 1; it must hold a list of JSON schemas" in message


def test_columns_are_renamed(aligned, capsys):
    row = {"question": "a b", "good": "c", "bad": "d", "prompt": 5}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert main(["train", aligned("dpo", row, columns=columns)]) == 0
    message = refused(capsys, aligned("dpo", row, columns={**columns, "choosen": "good"}, output_dir="other"))
    assert "`columns` gives the name 'choosen', which nothing reads; write 'chosen'." in message
    message = refused(capsys, aligned("dpo", row, columns={"chosen": "best"}, output_dir="other"))
    assert "`columns` names 'best', but the data has the columns question, good, bad, prompt." in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "'no_such_module:f' names no module that can be imported"),
        ("broken_rewards:f", "importing 'broken_rewards' failed: No module named 'no_such_package'"),
        ("leaving_rewards:f", "importing 'leaving_rewards' raised SystemExit()."),
        ("my_rewards:accuracy", "'my_rewards' has no `accuracy`; it has crash, short, strict, narrow, silent."),
        ("my_rewards:NUMBER", "'my_rewards:NUMBER' is int, not a function. Write `package.module:function`"),
        ("my_rewards:strict", "a function in `reward_funcs` needs `gold`"),
        ("my_rewards:narrow", "'my_rewards:narrow' takes completions, but is called with `prompts` and all columns"),
        ("my_rewards:", "'my_rewards:' is not a module and function. Write `package.module:function`"),
        ("./my_rewards.py:crash", "'./my_rewards.py:crash' is not a module and function."),
        ("my_rewards.crash", "is a reward model: write its Hub id or, for a function, 'my_rewards:crash'."),
        ("liger_trainer.rewards:acuracy", "it has completion_text, accuracy, format, length."),
        (LENGTH.replace("length", "accuracy"), "`accuracy` needs the data to have a column `solution` or `answer`"),
    ],
)
def test_reward_functions_that_cannot_be_called(aligned, capsys, name, message):
    assert message in refused(capsys, aligned("grpo", SUM, reward_funcs=[name]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward_funcs": []}, "`reward_funcs` is empty; name at least one"),
        ({"reward_options": {LENGTH: {}}}, "its keys are names in `reward_funcs` (here my_rewards:crash)"),
        (
            {"reward_funcs": [LENGTH], "reward_options": {LENGTH: {"most": 3}}},
            "has no parameter `most`; its parameters are completions, completion_ids, free_tokens, most_tokens.",
        ),
        (
            {"reward_weights": [1.0, 0.5]},
            "`reward_weights` has 2 numbers and `reward_funcs` 1 names (my_rewards:crash)",
        ),
        (
            {"generation_kwargs": {"max_new_token": 3}},
            "`generation_kwargs` has 'max_new_token', which generation does not use; did you mean 'max_new_tokens'?",
        ),
        ({"top_k": -1}, "`top_k` is -1; it must be 0 or more."),
        ({"top_p": 2.0}, "`top_p` is 2.0; it must be from 0 to 1."),
        ({"min_p": 5.0}, "`min_p` is 5.0; it must be from 0 to 1."),
        ({"repetition_penalty": -1.0}, "`repetition_penalty` is -1.0; it must be above 0."),
        ({"epsilon_high": -1.0}, "`epsilon_high` is -1.0; it must be 0 or more."),
        (
            {"num_generations": 3},
            "`per_device_train_batch_size` (2) times the processes times `steps_per_generation` (1; by default "
            "`gradient_accumulation_steps`): change one of them, or set `num_generations` to a divisor.",
        ),
        (
            {"num_generations_eval": 3, "eval_strategy": "steps", "test_split_size": 0.5},
            "`per_device_eval_batch_size` (8) times the processes: change it, or set `num_generations_eval` to a",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_options_of_generation_and_rewards(aligned, capsys, trainer, changes, words):
    assert words in refused(capsys, aligned(trainer, SUM, **changes))


def test_rewards_that_are_all_none_do_not_break_the_summary(aligned, capsys):
    path = aligned("grpo", SUM, reward_funcs=["my_rewards:silent"], logging_steps=1, loss_curve=True)
    assert main(["train", path]) == 0
    assert "mean reward" not in capsys.readouterr().out


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_reward_function_that_fails(aligned, capsys, trainer):
    message = refused(capsys, aligned(trainer, SUM))
    words = "The reward function `my_rewards:crash` raised ZeroDivisionError (division by zero) on sample 0 of"
    assert words in message
    message = refused(capsys, aligned(trainer, SUM, reward_funcs=["my_rewards:short"], output_dir="other"))
    assert "The reward function `my_rewards:short` returned 1 rewards for" in message


def test_prompts_without_a_token(aligned, capsys):
    message = refused(capsys, aligned("grpo", [SUM, {**SUM, "question": ""}]))
    assert "The column `prompt` holds empty text, which has no tokens; remove it." in message


@pytest.mark.parametrize("trainer", ["dpo", "kto", "orpo", "cpo", "grpo", "rloo"])
def test_a_negative_beta(aligned, capsys, trainer):
    assert "mine.yaml: `beta` is -0.1; it must be 0 or more." in refused(capsys, aligned(trainer, PAIR, beta=-0.1))


def test_data_of_another_trainer(aligned, capsys):
    message = refused(capsys, aligned("dpo", COMPLETION))
    assert "These are the columns of `trainer: sft`: use other data, or that trainer." in message
    message = refused(capsys, aligned("dpo", {"prompt": "a", "liked": "b"}))
    assert 'Rename one with `columns`, such as {"chosen": "liked"}.' in message
    message = refused(capsys, aligned("dpo", {"prompt": "a", "question": "b"}))  # no answer goes by that name
    assert "Use other data, or add the missing columns." in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"lora_target_modules": ["q_projj"]},
            "`lora_target_modules` is ['q_projj']; its linear layers are q_proj, k_proj, v_proj, o_proj,",
        ),
        (
            {"lora_target_modules": "[unclosed"},
            "it must be names of modules, or a regular expression (unterminated character set at position 0).",
        ),
        ({"lora_alpha": -5}, "`lora_alpha` is -5; it must be 1 or more."),
        (  # PEFT leaves out modules that it does not find
            {"lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["lm_head", "nope"]},
            "`lora_modules_to_save` is ['lm_head', 'nope'], but no module of PeftModelForCausalLM ends in 'nope';",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize(("trainer", "row"), [("sft", COMPLETION), ("dpo", PAIR)], ids=["sft", "dpo"])
def test_adapters(aligned, capsys, trainer, row, changes, words):
    assert words in refused(capsys, aligned(trainer, row, use_peft=True, **changes))


def test_one_lora_target_is_a_name(aligned):
    """TRL makes a regular expression of it, which has to match a module's whole path."""
    changes = {"use_peft": True, "lora_target_modules": "q_proj", "lora_modules_to_save": ["lm_head"]}
    assert main(["train", aligned("sft", COMPLETION, **changes)]) == 0
    assert json.loads(Path("run/adapter_config.json").read_text())["target_modules"] == ["q_proj"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dataset_name": "x", "seed": 3}, "`warm_start` sets `seed`, which it takes from the recipe"),
        ({"max_stepz": 3}, "mine.yaml: warm_start: unknown key `max_stepz` for `trainer: sft`"),
    ],
)
def test_keys_of_a_warm_start(aligned, capsys, keys, words):
    assert words in refused(capsys, aligned("dpo", PAIR, warm_start=keys))


def test_a_resumed_run_needs_the_model_that_it_started_with(aligned, capsys):
    assert main(["train", aligned("dpo", PAIR, save_strategy="steps", save_steps=1)]) == 0
    shutil.rmtree("run/initial_model")
    message = refused(capsys, "mine.yaml", "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert "'run/initial_model', the model that the run started with, is missing" in message


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize("prompt", ["turns", "with a system prompt"])
@pytest.mark.parametrize(
    ("template", "words"), [("{{ raise_exception('no system') }}", "no system"), (None, "chat_template is not set")]
)
def test_prompts_that_the_chat_template_refuses(aligned, capsys, trainer, prompt, template, words):
    from liger_trainer.recipe.smoke import train_tokenizer

    tokenizer = train_tokenizer(["a"], 300)
    tokenizer.chat_template = template
    tokenizer.save_pretrained("own")
    turns = {**SUM, "question": [{"role": "user", "content": "one and one"}]}
    row, system = (turns, None) if prompt == "turns" else (SUM, "Add.")
    own = {"tokenizer_name_or_path": "own", "tokenizer_vocab_size": None, "model_config": {**TINY, "vocab_size": 300}}
    message = refused(capsys, aligned(trainer, row, system_prompt=system, **own))
    assert "the chat template cannot be applied to the data: " in message
    assert words in message
