"""What is wrong with a recipe of an alignment trainer is told in one message with exit code 2."""

import json
import shutil
import sys
from pathlib import Path

import datasets  # noqa: F401 (first imported inside a test, it would log to the captured stderr of that test)
import pytest

from liger_trainer.cli import main

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PAIR = {"prompt": "a b", "chosen": "c", "rejected": "d"}
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
def recipe(tmp_path, monkeypatch):
    """Writes a small recipe of a trainer with changes (None removes a key) and its rows, and gives its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    Path("my_rewards.py").write_text(REWARDS)
    Path("broken_rewards.py").write_text("import no_such_package\n")
    Path("leaving_rewards.py").write_text("import sys\nsys.exit()\n")

    def write(trainer, row, **changes):
        values = {
            "trainer": trainer,
            "model_config": TINY,
            "tokenizer_vocab_size": 300,
            "data_files": "data.jsonl",
            "max_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "output_dir": "run",
            "report_to": "none",
            "save_strategy": "no",
            "loss_curve": False,
            "kernel_report": False,
            **changes,
        }
        if trainer in ("grpo", "rloo"):
            small = {"num_generations": 2, "max_completion_length": 2, "per_device_train_batch_size": 2}
            values = {"columns": {"prompt": "question"}, **small, **values}
            values.setdefault("reward_funcs", ["my_rewards:crash"])
        rows = row if isinstance(row, list) else [row] * 8
        Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("mine.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
        return str(tmp_path / "mine.yaml")

    return write


def refused(capsys, *arguments):
    assert main(["train", *arguments]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    last = message.rstrip().splitlines()[-1]
    assert last.startswith("liger-trainer: ")
    return last


@pytest.mark.parametrize(
    ("trainer", "known"),
    [
        ("dpo", "'sigmoid', 'hinge'"),
        ("grpo", "'grpo', 'dr_grpo'"),
        ("kto", "'kto', 'apo_zero_unpaired'"),
        ("cpo", "'ipo', 'simpo'"),
    ],
)
def test_unknown_loss_type(recipe, capsys, trainer, known):
    message = refused(capsys, recipe(trainer, PAIR, loss_type="sigmoidal"))
    assert "`loss_type` is" in message
    assert "sigmoidal" in message
    assert known in message


@pytest.mark.parametrize(
    ("trainer", "needed"),
    [
        ("dpo", "`chosen` and `rejected`"),
        ("orpo", "`chosen` and `rejected`"),
        ("cpo", "`chosen` and `rejected`"),
        ("reward", "`chosen` and `rejected`"),
        ("kto", "`prompt` and `completion` and `label` or `chosen` and `rejected`"),
        ("grpo", "`prompt`"),
        ("rloo", "`prompt`"),
    ],
)
def test_missing_columns(recipe, capsys, trainer, needed):
    message = refused(capsys, recipe(trainer, {"query": "a", "good": "b"}, columns=None))
    assert "The data has the columns query, good; " in message
    assert f"`trainer: {trainer}` needs {needed}. " in message
    assert '"query"}' in message


def test_columns_of_different_kinds(recipe, capsys):
    turns = [{"role": "assistant", "content": "c"}]
    message = refused(capsys, recipe("dpo", {**PAIR, "chosen": turns, "rejected": turns}))
    assert "The column `prompt` holds text and `chosen` turns" in message
    assert "The column `label` holds str" in refused(
        capsys, recipe("kto", {"prompt": "a", "completion": "b", "label": "good"})
    )


def test_columns_are_renamed(recipe, capsys):
    row = {"question": "a b", "good": "c", "bad": "d", "prompt": 5}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert main(["train", recipe("dpo", row, columns=columns)]) == 0
    message = refused(capsys, recipe("dpo", row, columns={"chosen": "best"}, output_dir="other"))
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
    ],
)
def test_reward_functions_that_cannot_be_called(recipe, capsys, name, message):
    assert message in refused(capsys, recipe("grpo", SUM, reward_funcs=[name]))


def test_no_reward_functions_and_wrong_options(recipe, capsys):
    assert "`reward_funcs` is empty; name at least one" in refused(capsys, recipe("grpo", SUM, reward_funcs=[]))
    options = {"liger_trainer.rewards:length": {"most_tokens": 3}}
    message = refused(capsys, recipe("grpo", SUM, reward_options=options))
    assert "its keys are names in `reward_funcs` (here my_rewards:crash)" in message
    name = "liger_trainer.rewards:length"
    message = refused(capsys, recipe("grpo", SUM, reward_funcs=[name], reward_options={name: {"most": 3}}))
    assert (
        "has no parameter `most`; its parameters are completions, completion_ids, free_tokens, most_tokens." in message
    )
    message = refused(capsys, recipe("rloo", SUM, reward_weights=[1.0, 0.5]))
    assert "`reward_weights` has 2 numbers and `reward_funcs` 1 names (my_rewards:crash)" in message


def test_rewards_that_are_all_none_do_not_break_the_summary(recipe, capsys):
    path = recipe("grpo", SUM, reward_funcs=["my_rewards:silent"], logging_steps=1, loss_curve=True)
    assert main(["train", path]) == 0
    assert "mean reward" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "values", "advice"),
    [
        ("num_generations", {"num_generations": 3}, "`per_device_train_batch_size` (2) times the processes"),
        (
            "num_generations_eval",
            {"num_generations_eval": 3, "eval_strategy": "steps", "test_split_size": 0.5},
            "`per_device_eval_batch_size` (8) times the processes",
        ),
    ],
)
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_generations_that_do_not_divide_the_batch(recipe, capsys, trainer, key, values, advice):
    message = refused(capsys, recipe(trainer, SUM, **values))
    assert advice in message
    assert f"set `{key}` to a divisor" in message


@pytest.mark.parametrize("trainer", ["dpo", "kto", "orpo", "cpo", "grpo", "rloo"])
def test_a_negative_beta(recipe, capsys, trainer):
    assert "mine.yaml: `beta` is -0.1; it must be 0 or more." in refused(capsys, recipe(trainer, PAIR, beta=-0.1))


def test_data_of_another_trainer(recipe, capsys):
    message = refused(capsys, recipe("dpo", {"prompt": "a", "completion": "b"}))
    assert "These are the columns of `trainer: sft`: use other data, or that trainer." in message
    message = refused(capsys, recipe("dpo", {"prompt": "a", "question": "b"}))
    assert 'Rename one with `columns`, such as {"chosen": "question"}.' in message


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_lora_targets_that_are_not_there(recipe, capsys, trainer):
    row = {"prompt": "a", "completion": "b"} if trainer == "sft" else PAIR
    message = refused(capsys, recipe(trainer, row, use_peft=True, lora_target_modules=["q_projj"]))
    assert "`lora_target_modules` is ['q_projj']; its linear layers are q_proj, k_proj, v_proj, o_proj," in message


def test_one_lora_target_is_a_name(recipe):
    """TRL makes a regular expression of it, which has to match a module's whole path."""
    changes = {"use_peft": True, "lora_target_modules": "q_proj"}
    assert main(["train", recipe("sft", {"prompt": "a", "completion": "b"}, **changes)]) == 0
    assert json.loads(Path("run/adapter_config.json").read_text())["target_modules"] == ["q_proj"]


def test_modules_to_save_that_are_not_there(recipe, capsys):
    """PEFT leaves them out without a word."""
    row, changes = {"prompt": "a", "completion": "b"}, {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}
    message = refused(capsys, recipe("sft", row, **changes, lora_modules_to_save=["lm_head", "nope"]))
    assert (
        "`lora_modules_to_save` is ['lm_head', 'nope'], but no module of PeftModelForCausalLM ends in 'nope';"
        in message
    )
    assert main(["train", recipe("sft", row, **changes, lora_modules_to_save=["lm_head"], output_dir="good")]) == 0


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_generation_options_that_nothing_reads(recipe, capsys, trainer):
    message = refused(capsys, recipe(trainer, SUM, generation_kwargs={"max_new_token": 3}))
    assert (
        "`generation_kwargs` has 'max_new_token', which generation does not use; did you mean 'max_new_tokens'?"
        in message
    )


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_reward_function_that_fails(recipe, capsys, trainer):
    message = refused(capsys, recipe(trainer, SUM))
    assert (
        "The reward function `my_rewards:crash` raised ZeroDivisionError (division by zero) on sample 0 of" in message
    )
    message = refused(capsys, recipe(trainer, SUM, reward_funcs=["my_rewards:short"], output_dir="other"))
    assert "The reward function `my_rewards:short` returned 1 rewards for" in message


def test_accuracy_without_answers(recipe, capsys):
    message = refused(capsys, recipe("grpo", SUM, reward_funcs=["liger_trainer.rewards:accuracy"]))
    assert "`accuracy` needs the data to have a column `solution` or `answer`" in message


def test_warm_start_has_the_models_of_the_recipe(recipe, capsys):
    message = refused(capsys, recipe("dpo", PAIR, warm_start={"dataset_name": "x", "seed": 3}))
    assert "`warm_start` sets `seed`, which it takes from the recipe" in message
    message = refused(capsys, recipe("dpo", PAIR, warm_start={"max_stepz": 3}))
    assert "mine.yaml: warm_start: unknown key `max_stepz` for `trainer: sft`" in message


def test_a_resumed_run_needs_the_model_it_began_with(recipe, capsys):
    assert main(["train", recipe("dpo", PAIR, save_strategy="steps", save_steps=1)]) == 0
    shutil.rmtree("run/initial_model")
    message = refused(capsys, "mine.yaml", "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert "The model that the run started with is no longer in 'run/initial_model'" in message


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize("prompt", ["turns", "with a system prompt"])
@pytest.mark.parametrize(
    ("template", "words"), [("{{ raise_exception('no system') }}", "no system"), (None, "chat_template is not set")]
)
def test_prompts_that_the_chat_template_refuses(recipe, capsys, trainer, prompt, template, words):
    from liger_trainer.recipe.quickstart import train_tokenizer

    tokenizer = train_tokenizer(["a"], 300)
    tokenizer.chat_template = template
    tokenizer.save_pretrained("own")
    turns = {**SUM, "question": [{"role": "user", "content": "one and one"}]}
    row, system = (turns, None) if prompt == "turns" else (SUM, "Add.")
    own = {"tokenizer_name_or_path": "own", "tokenizer_vocab_size": None, "model_config": {**TINY, "vocab_size": 300}}
    message = refused(capsys, recipe(trainer, row, system_prompt=system, **own))
    assert "the chat template cannot be applied to the data: " in message
    assert words in message


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("top_k", -1, "0 or more"),
        ("top_p", 2.0, "from 0 to 1"),
        ("min_p", 5.0, "from 0 to 1"),
        ("repetition_penalty", -1.0, "above 0"),
        ("epsilon_high", -1.0, "0 or more"),
    ],
)
def test_sampling_that_is_none(recipe, capsys, key, value, allowed):
    assert f"`{key}` is {value}; it must be {allowed}." in refused(capsys, recipe("grpo", SUM, **{key: value}))


def test_adapters_that_are_none(recipe, capsys):
    message = refused(capsys, recipe("dpo", PAIR, use_peft=True, lora_target_modules="[unclosed"))
    assert "it must be names of modules, or a regular expression (unterminated character set at position 0)." in message
    assert "`lora_alpha` is -5; it must be 1 or more." in refused(capsys, recipe("dpo", PAIR, lora_alpha=-5))


def test_rows_of_two_kinds(recipe, capsys):
    turns = [{"role": "assistant", "content": "c"}]
    message = refused(capsys, recipe("dpo", [PAIR, {**PAIR, "chosen": turns}]))
    assert "The column `chosen` holds str in row 0 and list in row 1; all rows must hold text, or all" in message
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (0, 1, 2)]
    assert "The column `label` holds [0, 1, 2]; it must hold true or false." in refused(capsys, recipe("kto", rows))


def test_prompts_without_a_token(recipe, capsys):
    message = refused(capsys, recipe("grpo", [SUM, {**SUM, "question": ""}]))
    assert "The column `prompt` holds empty text, which has no tokens; remove it." in message
