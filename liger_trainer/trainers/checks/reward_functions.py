"""Reward functions wrapped so that an error names the function and the sample."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import REWARD_FUNCTIONS
from liger_trainer.rewards import completion_text

get_callable_name, is_async_callable = require(REWARD_FUNCTIONS)

RewardFunction = Callable[..., Any]

_LARGEST = torch.finfo(torch.float32).max  # TRL stores rewards in fp32

_checked: weakref.WeakSet[RewardFunction] = weakref.WeakSet()  # plain functions: a callable object may have no hash


class RewardError(ValueError):
    """A reward function raised, or did not return one number or None for each completion."""


def checked_reward_functions(functions: Any) -> Any:
    """The `reward_funcs` of a trainer, with every function wrapped in checks; models and names of models stay."""
    if isinstance(functions, list):
        return [checked_reward_functions(function) for function in functions]
    if functions is None or isinstance(functions, (str, nn.Module)):
        return functions
    return checked_reward_function(functions)


def checked_reward_function(function: RewardFunction, name: str | None = None) -> RewardFunction:
    """`function`, except that a failure is a [`RewardError`] with its name and the sample.

    Args:
        function: Called by keyword with `prompts`, `completions` and the columns of the data; may be async. The
            keywords of a `functools.partial` win over columns of the same name.
        name: The name of the function in messages; its own name by default. Logs use its own name.
    """
    if inspect.isfunction(function) and function in _checked:
        return function
    own_name = get_callable_name(function)
    name = name or own_name
    fixed = function.keywords if isinstance(function, functools.partial) else {}

    if is_async_callable(function):

        async def checked(**given: Any) -> list[float | None]:
            given = {key: value for key, value in given.items() if key not in fixed}
            try:
                rewards = await function(**given)
            except (Exception, SystemExit) as error:
                raise _failure(name, error, await _first_that_raises_async(function, given), given) from error
            return _checked_rewards(name, rewards, given["completions"])

    else:

        def checked(**given: Any) -> list[float | None]:  # type: ignore[misc]
            given = {key: value for key, value in given.items() if key not in fixed}
            try:
                rewards = function(**given)
            except (Exception, SystemExit) as error:
                raise _failure(name, error, _first_that_raises(function, given), given) from error
            return _checked_rewards(name, rewards, given["completions"])

    checked = functools.wraps(function, updated=())(checked)
    checked.__name__ = own_name
    _checked.add(checked)
    return checked


def needed_columns(function: RewardFunction) -> set[str]:
    """The columns that `function` cannot be called without: its parameters that have no default."""
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have none
        return set()
    return {item.name for item in parameters if item.kind in named and item.default is item.empty} - given


def _samples(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments for a call on each sample alone; every list as long as the batch has one value for each sample."""
    count = len(given["completions"])
    batched = {key for key, value in given.items() if isinstance(value, (list, tuple)) and len(value) == count}
    for position in range(count):
        yield {key: value[position : position + 1] if key in batched else value for key, value in given.items()}


def _first_that_raises(function: RewardFunction, given: Mapping[str, Any]) -> int | None:
    for position, sample in enumerate(_samples(given)):
        try:
            function(**sample)
        except (Exception, SystemExit):
            return position
    return None


async def _first_that_raises_async(function: Callable[..., Awaitable[Any]], given: Mapping[str, Any]) -> int | None:
    for position, sample in enumerate(_samples(given)):
        try:
            await function(**sample)
        except (Exception, SystemExit):
            return position
    return None


def _excerpt(completion: Any) -> str:
    text = completion_text(completion)
    return repr(text if len(text) <= 80 else text[:79] + "…")


def _failure(name: str, error: BaseException, guilty: int | None, given: Mapping[str, Any]) -> RewardError:
    completions = given["completions"]
    where = f"a batch of {len(completions)}, but on none of its samples alone"
    if guilty is not None:
        where = f"sample {guilty} of {len(completions)}, the completion {_excerpt(completions[guilty])}"
    return RewardError(f"The reward function `{name}` raised {type(error).__name__} ({error}) on {where}.")


def _checked_rewards(name: str, rewards: Any, completions: Sequence[Any]) -> list[float | None]:
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    if not isinstance(rewards, (list, tuple)):
        raise RewardError(
            f"The reward function `{name}` returned {type(rewards).__name__}, not a list with one number (or None) for "
            "each completion."
        )
    if len(rewards) != len(completions):
        raise RewardError(
            f"The reward function `{name}` returned {len(rewards)} rewards for {len(completions)} completions; it must "
            "return one for each, or None where it has none."
        )
    values: list[float | None] = []
    for position, reward in enumerate(rewards):
        try:
            value = None if reward is None else float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if value is not None and not abs(value) <= _LARGEST:
            raise RewardError(
                f"The reward function `{name}` returned {reward!r} for sample {position} of {len(completions)}, the "
                f"completion {_excerpt(completions[position])}; it must return a finite number or None."
            )
        values.append(value)
    return values
