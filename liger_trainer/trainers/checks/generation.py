"""The checks around generation that the GRPO and RLOO trainers share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from liger_trainer.trainers.checks.batches import check_prompts
from liger_trainer.trainers.checks.reward_functions import checked_reward_functions
from liger_trainer.trainers.checks.trl_arguments import check_completions
from liger_trainer.trainers.split_generation import alike, draw_alike
from liger_trainer.trainers.trl_mixin import LigerTRLMixin


class CheckedGeneration(LigerTRLMixin):
    """Checks prompts before, and completions after a backend or the user's `rollout_func` generates, and rewards."""

    reward_funcs: list[Any]  # TRL's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = _checked_rollout(kwargs["rollout_func"])
        for name in ("_calculate_rewards", "_generate_single_turn"):
            if not hasattr(super(), name):
                raise ImportError(
                    f"The installed trl's trainer has no `{name}`, around which the Liger trainers check. Supported is "
                    "trl>=1.16,<2: `pip install 'trl>=1.16,<2'`."
                )
        super().__init__(*args, **kwargs)
        draw_alike(self)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return alike(super()._get_train_sampler(*args, **kwargs), self.get_tp_size())

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        own = self.reward_funcs
        self.reward_funcs = checked_reward_functions(own)
        try:
            return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.reward_funcs = own

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        check_prompts(prompt_ids, self.accelerator.unwrap_model(self.model))
        generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        if not getattr(self, "tools", None):  # a turn after a tool's answer may be empty
            completion_ids = generated[0] if isinstance(generated, tuple) else generated
            check_completions(completion_ids, "vLLM" if self.args.use_vllm else "Generation")  # type: ignore[attr-defined]
        return generated


def _checked_rollout(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(rollout_func)
    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        output = rollout_func(*args, **kwargs)
        check_completions(output.get("completion_ids", ()), "`rollout_func`")
        return output

    return checked
