"""Checks of what a TRL trainer is given, where TRL's own error would come late or be unclear.

Reward functions are wrapped, so that an error names the function and the sample.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import REWARD_FUNCTIONS
from liger_trainer.rewards import completion_text

logger = logging.getLogger("liger_trainer")


def check_rows(dataset: Any) -> None:
    """Checks that a training dataset still has rows after it was prepared."""
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ValueError(
            "`train_dataset` has no rows to train on. It was empty, or all of its rows were dropped as too long: TRL "
            "leaves out rows without a completion after the cut at `max_length`. Increase `max_length`, or check the "
            "data."
        )


def check_reference(policy: nn.Module, reference: nn.Module, processing_class: Any) -> None:
    """Checks that a reference model has an embedding for every token the policy is trained on.

    Sizes that differ only by padding are fine: both embeddings have the tokenizer's ids.
    """
    sizes = [model.config.get_text_config().vocab_size for model in (policy, reference)]  # type: ignore[operator, union-attr]
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    needed = len(tokenizer) if isinstance(tokenizer, Sized) else sizes[0]
    if sizes[0] != sizes[1] and sizes[1] < needed:
        raise ValueError(
            f"The reference model has a vocabulary of {sizes[1]}, the model one of {sizes[0]} and the tokenizer "
            f"{needed} tokens: they do not share a vocabulary. Give a `ref_model` with the model's tokenizer; where "
            "none was given, the reference is loaded from the path the model came from "
            f"({policy.config.name_or_path!r}), so save a model with resized embeddings first and load that."  # type: ignore[union-attr]
        )


def check_completions(completion_ids: Sequence[Sequence[int]], source: str) -> None:
    """Checks that every completion of `source`, an engine, has a token, since TRL's statistics read the last one."""
    for position, ids in enumerate(completion_ids):
        if len(ids) == 0:
            raise ValueError(
                f"{source} returned no token for sample {position} of {len(completion_ids)}. A completion has at least "
                "one, such as the end-of-sequence token; check its stop strings and its limit of tokens."
            )


def truncated_sampling(args: Any) -> tuple[str, str] | None:
    """Whether GRPO is going to divide probabilities of all tokens by those of the tokens that a truncation kept.

    vLLM's log-probabilities are normalised over the tokens that `top_p`, `top_k` and `min_p` keep, the trainer's over
    the vocabulary. A ratio of the two is the kept probability, even for equal weights. It is computed only with vLLM:
    for the correction by importance sampling, and to mask sequences that are off the policy. RLOO, and GRPO without
    vLLM, compare the trainer's log-probabilities with each other.

    Returns:
        The mistake, and what to do; None if there is none.
    """
    sampling = {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p, **(args.generation_kwargs or {})}
    truncates = {"top_p": sampling["top_p"] < 1.0, "top_k": sampling["top_k"] > 0, "min_p": bool(sampling["min_p"])}
    names = [name for name, on in truncates.items() if on]
    whole = {"top_p": 1.0, "top_k": 0, "min_p": None}
    without = []
    if getattr(args, "vllm_importance_sampling_correction", False):
        without.append("`vllm_importance_sampling_correction=False`")
    if getattr(args, "off_policy_mask_threshold", None) is not None:
        without.append("`off_policy_mask_threshold=None`")
    if not (args.use_vllm and names and without):
        return None
    return (
        f"{', '.join(f'`{name}={sampling[name]}`' for name in names)}: vLLM's log-probabilities are normalised over "
        "the tokens that this keeps, the trainer's over all. Their ratio is too small by the probability of the kept "
        "tokens, in a whole completion by the product of these",
        f"Set {', '.join(f'`{name}={whole[name]}`' for name in names)}, or do without the ratio: "
        f"{' and '.join(without)}",
    )


def warn_of_truncated_sampling(trainer: Any) -> None:
    """Warns of what [`truncated_sampling`] finds."""
    found = truncated_sampling(trainer.args)
    if found is not None and trainer.is_world_process_zero():
        logger.warning("%s. %s.", *found)


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
