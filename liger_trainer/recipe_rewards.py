"""The reward functions a recipe names."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liger_trainer.recipe_file import RecipeError

_ALLOWED = (
    "Write `package.module:function`, such as `liger_trainer.rewards:accuracy`; a name without a colon is a reward "
    "model: its Hub id or folder."
)


def load_reward_functions(arguments: Any) -> list[Any]:
    """What `reward_funcs` names: functions, checked and with their `reward_options`; reward models by their names.

    Args:
        arguments: `RewardArguments`; anything else names none.

    Raises:
        RecipeError: if a module or function cannot be found, or an option is none of the function's.
    """
    from liger_trainer.configs.recipe_arguments import RewardArguments
    from liger_trainer.trainers.reward_functions import checked_reward_function

    if not isinstance(arguments, RewardArguments):
        return []
    functions: list[Any] = []
    for name in arguments.reward_funcs or []:
        options = (arguments.reward_options or {}).get(name)
        if ":" not in name:
            if options:
                raise RecipeError(f"`reward_options` holds {name!r}, which is a reward model and takes none.")
            functions.append(name)
            continue
        function = _import(name)
        functions.append(checked_reward_function(functools.partial(function, **options) if options else function, name))
    return functions


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # last, so that nothing there takes the place of an installed package
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and not f"{module_name}.".startswith(f"{missing}."):
            raise RecipeError(f"`reward_funcs`: importing {module_name!r} failed: {error}.") from error
        raise RecipeError(
            f"`reward_funcs`: {name!r} names no module that can be imported (looked in {here} too): {error}. {_ALLOWED}"
        ) from error
    except Exception as error:
        raise RecipeError(
            f"`reward_funcs`: importing {module_name!r} raised {type(error).__name__}: {error}."
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise RecipeError(
                f"`reward_funcs`: {module_name!r} has no `{attribute}`; it has {', '.join(public) or 'no functions'}."
            )
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(f"`reward_funcs`: {name!r} is {type(found).__name__}, not a function. {_ALLOWED}")
    return found
