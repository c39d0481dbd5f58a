"""An error of a reward function names it and the sample; a good one runs as it is."""

import asyncio
import dataclasses
import functools
import sys

import pytest
import torch
from datasets import Dataset
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

import liger_trainer
from liger_trainer.trainers.checks.trl_arguments import (
    RewardError,
    checked_reward_function,
    checked_reward_functions,
    needed_columns,
)
from tests.trainers.tiny import COMMON, llama, tokenizer

TEXTS = ["a", "bb", "ccc"]


def long_enough(completions, least, **columns):
    return [float(len(text) >= int(limit)) for text, limit in zip(completions, least, strict=True)]


def test_a_good_function_runs_as_it_is():
    checked = checked_reward_function(long_enough)
    assert checked(completions=TEXTS, least=[1, 3, 3]) == [1.0, 0.0, 1.0]
    assert get_callable_name(checked) == "long_enough"
    assert checked_reward_function(checked) is checked


def test_a_callable_object_without_a_hash():
    @dataclasses.dataclass
    class Length:
        scale: float

        def __call__(self, completions, **columns):
            return [self.scale * len(text) for text in completions]

    checked = checked_reward_function(Length(2.0))
    assert checked(completions=TEXTS) == [2.0, 4.0, 6.0]
    assert checked_reward_function(checked) is checked


def test_the_sample_that_fails_is_named():
    checked = checked_reward_function(long_enough, "mine.py:long_enough")
    with pytest.raises(RewardError) as error:
        checked(prompts=TEXTS, completions=TEXTS, least=[1, "many", 2], trainer_state=object())
    message = str(error.value)
    assert "`mine.py:long_enough` raised ValueError" in message
    assert "sample 1 of 3, the completion 'bb'" in message


def test_a_batch_that_fails_as_a_whole():
    def alone(completions):
        if len(completions) > 1:
            raise KeyError("x")
        return [1.0]

    with pytest.raises(RewardError, match="a batch of 3, but on none of its samples alone"):
        checked_reward_function(alone)(completions=TEXTS)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 3 completions"),
        (1.0, "returned float, not a list"),
        ([1.0, "good", 2.0], "returned 'good' for sample 1 of 3, the completion 'bb'"),
        ([1.0, 2.0, float("inf")], "returned inf for sample 2 of 3"),
        ([1.0, float("nan"), None], "returned nan for sample 1 of 3"),
        (torch.tensor([1.0, torch.nan, 0.0]), "returned nan for sample 1 of 3"),
        (["nan", 1.0, 1.0], "returned 'nan' for sample 0 of 3"),
        ([1.0, 1.0, -1e39], r"returned -1e\+39 for sample 2 of 3"),  # an infinity in the fp32 of TRL
    ],
)
def test_what_is_returned(returned, message):
    with pytest.raises(RewardError, match=message):
        checked_reward_function(lambda completions: returned)(completions=TEXTS)


def test_numbers_of_any_kind_and_none_are_rewards():
    assert checked_reward_function(lambda completions: [True, None, 2])(completions=TEXTS) == [1.0, None, 2.0]
    assert checked_reward_function(lambda completions: torch.arange(3))(completions=TEXTS) == [0.0, 1.0, 2.0]


def test_async_functions_stay_async():
    async def slow(completions, **columns):
        return [float(len(text)) for text in completions]

    async def broken(completions, **columns):
        return [1 / (len(text) - 2) for text in completions]

    checked = checked_reward_function(slow)
    assert is_async_callable(checked)
    assert asyncio.run(checked(completions=TEXTS)) == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match=r"`broken` raised ZeroDivisionError .* sample 1 of 3"):
        asyncio.run(checked_reward_function(broken)(completions=TEXTS))


def test_a_function_that_ends_the_process():
    def leaves(completions):
        sys.exit(0)

    with pytest.raises(RewardError, match=r"`leaves` raised SystemExit \(0\) on sample 0 of 3"):
        checked_reward_function(leaves)(completions=TEXTS)


def test_options_win_over_columns():
    checked = checked_reward_function(functools.partial(long_enough, least=[2, 2, 2]))
    assert checked(completions=TEXTS, least=[9, 9, 9]) == [0.0, 1.0, 1.0]
    assert get_callable_name(checked) == "long_enough"


def test_models_and_their_names_stay():
    model = nn.Linear(1, 1)
    checked = checked_reward_functions([model, "someone/reward-model", long_enough])
    assert checked[:2] == [model, "someone/reward-model"]
    assert checked[2] is not long_enough
    assert checked_reward_functions(None) is None


def test_needed_columns():
    assert needed_columns(long_enough) == {"least"}
    assert needed_columns(checked_reward_function(long_enough)) == {"least"}
    assert needed_columns(functools.partial(long_enough, least=[1])) == set()
    assert needed_columns(lambda prompts, completions, completion_ids, trainer_state, a, b=1: []) == {"a"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trainers_check_the_functions_they_are_given(name, tmp_path):
    """Without it, the error is the function's own, with neither its name nor the sample."""
    folder = tmp_path / "model"
    llama().save_pretrained(folder)
    rows = Dataset.from_list([{"prompt": "the cat", "least": word} for word in ("1", "many", "1", "1")])
    arguments = {**COMMON, "bf16": False, "num_generations": 2, "max_completion_length": 3}
    trainer = getattr(liger_trainer, f"Liger{name}Trainer")(
        str(folder),
        long_enough,
        args=getattr(liger_trainer, f"Liger{name}Config")(str(tmp_path / "out"), **arguments),
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    with pytest.raises(RewardError, match=r"`long_enough` raised ValueError .* on sample \d of 4"):
        trainer.train()
    assert trainer.reward_funcs[0] is long_enough, "users read their own functions"
    assert trainer.reward_func_names == ["long_enough"]
