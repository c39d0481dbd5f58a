"""The libraries and settings that `bench training` compares; a file of yours may register more."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from liger_trainer.benchmarks.registry import BenchmarkError, closest
from liger_trainer.benchmarks.trainer_setups import Setup

TRAINING_PROVIDERS: dict[str, Callable[[Setup], Trainer]] = {}


def training_provider(name: str) -> Callable[[Callable[[Setup], Trainer]], Callable[[Setup], Trainer]]:
    """Registers a function that builds the trainer of a `Setup`."""

    def register(function: Callable[[Setup], Trainer]) -> Callable[[Setup], Trainer]:
        TRAINING_PROVIDERS[name] = function
        return function

    return register


@training_provider("hf")
def hugging_face(setup: Setup) -> Trainer:
    return setup.trainer(use_liger_kernel=False)


@training_provider("hf activation_offloading")
def hugging_face_offloading(setup: Setup) -> Trainer:
    return setup.trainer(use_liger_kernel=False, activation_offloading=True)


@training_provider("torch.compile")
def compiled(setup: Setup) -> Trainer:
    return setup.trainer(use_liger_kernel=False, torch_compile=True)


@training_provider("liger-kernel")
def liger(setup: Setup) -> Trainer:
    from liger_trainer import set_stock_trainer_kernels

    set_stock_trainer_kernels("liger_kernel")
    return setup.trainer(use_liger_kernel=True)


@training_provider("liger_trainer")
def ours(setup: Setup) -> Trainer:
    return setup.trainer(ours=True)


@training_provider("liger_trainer tiled_mlp")
def ours_in_tiles(setup: Setup) -> Trainer:
    return setup.trainer(ours=True, liger_kernel_config={"tiled_mlp": True})


@training_provider("liger_trainer activation_offloading")
def ours_offloading(setup: Setup, fraction: float = 1.0) -> Trainer:
    return setup.trainer(ours=True, **_offloaded(fraction))


@training_provider("liger_trainer tiled_mlp activation_offloading")
def ours_for_long_sequences(setup: Setup, fraction: float = 1.0) -> Trainer:
    return setup.trainer(ours=True, liger_kernel_config={"tiled_mlp": True}, **_offloaded(fraction))


def _offloaded(fraction: float) -> dict[str, Any]:
    return {"activation_offloading": True, "activation_offloading_fraction": fraction}


def find_training_provider(name: str) -> Callable[[Setup], Trainer]:
    """The provider NAME, or for ``NAME=NUMBER`` the provider NAME with that number as its second argument.

    Raises:
        BenchmarkError: if there is no such provider, or it takes no number.
    """
    known, equals, number = name.partition("=")
    function = TRAINING_PROVIDERS[closest(known, TRAINING_PROVIDERS, "provider")]
    if not equals:
        return function
    settings = list(inspect.signature(function).parameters)[1:]
    if not settings:
        raise BenchmarkError(f"Provider {known!r} takes no number; leave out {equals + number!r}.")
    try:
        return functools.partial(function, **{settings[0]: float(number)})
    except ValueError:
        raise BenchmarkError(f"Provider {name!r}: {number!r} is no number.") from None
