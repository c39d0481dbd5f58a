"""The reward functions and reward models of a recipe."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.model import check_weights, read_config
from liger_trainer.recipe.schema import RewardArguments
from liger_trainer.trainers.checks.trl_arguments import checked_reward_function

_ALLOWED = (
    "Write `package.module:function`, such as `liger_trainer.rewards:accuracy`; a name without a colon is a reward "
    "model: its Hub id or folder."
)
_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")  # beside the columns of the data


def load_reward_functions(arguments: Any) -> list[Any]:
    """The functions in `reward_funcs`, checked and with their `reward_options`, and reward models by their names.

    Arguments that are no `RewardArguments` have none.
    """
    if not isinstance(arguments, RewardArguments):
        return []
    functions: list[Any] = []
    for name in arguments.reward_funcs or []:
        options = (arguments.reward_options or {}).get(name)
        if ":" not in name:
            if options:
                raise RecipeError(f"`reward_options` holds {name!r}, which is a reward model and takes no options.")
            functions.append(name)
            continue
        function = _import(name)
        _check_call(name, function, options or {})
        functions.append(checked_reward_function(functools.partial(function, **options) if options else function, name))
    return functions


def check_reward_models(arguments: Any) -> None:
    """Checks, before anything is loaded, that the reward models in `reward_funcs` exist.

    A function that is written with a dot counts as a reward model.
    """
    names = arguments.reward_funcs or [] if isinstance(arguments, RewardArguments) else []
    for name in names:
        if ":" in name:
            continue
        try:
            read_config(name, "`reward_funcs`")
        except RecipeError as error:
            module, _, function = name.rpartition(".")
            meant = f" or, for a function, {f'{module}:{function}'!r}" if module and "/" not in name else ""
            raise RecipeError(f"{error} A name without a colon is a reward model: write its Hub id{meant}.") from error
        check_weights(name, f"`reward_funcs`: {name!r}")


def _check_call(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    named = [key for key, item in parameters.items() if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    unknown = [key for key in options if key not in named]
    if unknown:
        raise RecipeError(
            f"`reward_options`: {name!r} has no parameter `{unknown[0]}`; its parameters are {', '.join(named)}."
        )
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    missing = [key for key in _ALWAYS_GIVEN if key not in named]
    if missing and not takes_all:
        raise RecipeError(
            f"`reward_funcs`: {name!r} takes {', '.join(named) or 'nothing'}, but is called with `{missing[0]}` and "
            "all columns of the data too; add `**columns` to its parameters."
        )


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not attribute or "/" in module_name or module_name.endswith(".py"):
        raise RecipeError(f"`reward_funcs`: {name!r} is not a module and function. {_ALLOWED}")
    here = str(Path.cwd())
    if here not in sys.path:  # last, so that nothing there hides an installed package
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and not f"{module_name}.".startswith(f"{missing}."):
            raise RecipeError(f"`reward_funcs`: importing {module_name!r} failed: {error}.") from error
        raise RecipeError(
            f"`reward_funcs`: {name!r} names no module that can be imported (not even from {here}): {error}. {_ALLOWED}"
        ) from error
    except (Exception, SystemExit) as error:  # a script may call sys.exit()
        raise RecipeError(f"`reward_funcs`: importing {module_name!r} raised {error!r}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [
                key
                for key, value in vars(found).items()
                if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module_name
            ]
            raise RecipeError(
                f"`reward_funcs`: {module_name!r} has no `{attribute}`; it has {', '.join(public) or 'no functions'}."
            )
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(f"`reward_funcs`: {name!r} is {type(found).__name__}, not a function. {_ALLOWED}")
    return found
