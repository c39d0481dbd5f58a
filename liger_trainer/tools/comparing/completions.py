"""Completions that a policy samples: the stock run's are recorded, and the other runs get the same ones.

Generation itself is not compared. Its random numbers and the logits' last bits decide each token, and one other token
makes another batch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from liger_trainer.recipe.file import RecipeError


class Completions:
    """Takes the place of `generate` of every model in this process, until it is closed.

    Args:
        folder: Where the calls are recorded, one file each.
        record: Whether to generate and record; else the recorded calls are repeated.
    """

    def __init__(self, folder: Path, record: bool) -> None:
        self.folder, self.record = folder, record
        self.calls = 0
        self.seconds = 0.0
        """The time in `generate` so far, which is not training."""
        folder.mkdir(exist_ok=True)

    def install(self) -> None:
        """Replaces `generate`."""
        from transformers import GenerationMixin

        mixin: Any = GenerationMixin
        native, completions = mixin.generate, self

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return completions._recorded(model, native, *args, **kwargs)
            finally:
                completions.seconds += time.perf_counter() - start

        mixin.generate = generate

    def _recorded(self, model: Any, native: Any, *args: Any, **kwargs: Any) -> Any:
        file, prompts = self.folder / f"{self.calls}.pt", kwargs.get("input_ids", args[0] if args else None)
        self.calls += 1
        if self.record:
            result = native(model, *args, **kwargs)
            torch.save({"prompts": prompts, "result": result, "random": random_state()}, file)
            return result
        if not file.is_file():
            raise RecipeError(f"The stock run generated {self.calls - 1} times, and this one once more.")
        call = torch.load(file, map_location=model.device, weights_only=False)  # written by the stock run
        if not same_prompts(prompts, call["prompts"]):
            raise RecipeError("The runs asked for completions of different prompts, so they cannot be compared.")
        set_random_state(call["random"])
        return call["result"]


def same_prompts(found: Any, expected: Any) -> bool:
    """Whether both are the same ids."""
    return found is expected or (found.shape == expected.shape and bool((found == expected.to(found.device)).all()))


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's random numbers on the CPU and the accelerator."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Continues from a [`random_state`]."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
