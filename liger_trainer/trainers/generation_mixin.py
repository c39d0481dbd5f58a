"""What `LigerGRPOTrainer` and `LigerRLOOTrainer` share: checks around generation, groups, and tensor parallelism.

TRL gives every process a seed and prompts of its own. The processes of a tensor-parallel group compute one model
together, so they must get the same prompts and draw the same tokens for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.trl import LOGGED_COMPLETIONS
from liger_trainer.head.context import labelled_rows_at_most
from liger_trainer.trainers.checks.batches import check_prompts
from liger_trainer.trainers.checks.reward_functions import checked_reward_functions
from liger_trainer.trainers.checks.trl_arguments import check_completions, warn_of_truncated_sampling
from liger_trainer.trainers.grouping import GroupedCompletions
from liger_trainer.trainers.labelled_bound import bound_of_parts
from liger_trainer.trainers.reference import ReferenceMixin

if TYPE_CHECKING:
    from trl import GRPOTrainer

    class _Base(ReferenceMixin, GRPOTrainer): ...
else:
    _Base = ReferenceMixin


class GenerationMixin(_Base, GroupedCompletions):
    """Checks prompts before generation, completions after it (by a backend or a `rollout_func`), and rewards.

    It also counts the tokens of the completions for the head, which multiplies no others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = _checked_rollout(kwargs["rollout_func"])
        super().__init__(*args, **kwargs)
        seed_groups_alike(self)
        warn_of_truncated_sampling(self)
        if available(LOGGED_COMPLETIONS):
            self._run_report.completions = self._logs

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        # Its batches have the prompts of all processes; the processes of a tensor-parallel group share theirs.
        sampler.batch_size //= self.get_tp_size()
        return sampler

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        own = self.reward_funcs
        self.reward_funcs = checked_reward_functions(own)
        try:
            return super()._calculate_rewards(*args, **kwargs)
        finally:
            self.reward_funcs = own

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        check_prompts(prompt_ids, self.accelerator.unwrap_model(self.model))
        generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if not getattr(self, "tools", None):  # after a tool's answer a turn may be empty
            completion_ids = generated[0] if isinstance(generated, tuple) else generated
            config: Any = self.args
            check_completions(completion_ids, "vLLM" if config.use_vllm else "Generation")
        return generated

    def _labelled_bound(self, inputs: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # the next method knows what each forward scores

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        counts = self.model.training and self.args.use_liger_kernel  # also before the loss: the old and the reference
        bound = bound_of_parts(attention_mask[:, -logits_to_keep:], batch_size) if counts else None
        with labelled_rows_at_most(bound):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs
            )


def _checked_rollout(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(rollout_func)
    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        output = rollout_func(*args, **kwargs)
        check_completions(output.get("completion_ids", ()), "`rollout_func`")
        return output

    return checked


def seed_groups_alike(trainer: Any) -> None:
    """Gives all processes of a tensor-parallel group of a GRPO or RLOO `trainer` the same seed.

    Raises:
        ValueError: for what TRL does differently on the processes of a group: vLLM, a streamed dataset, and groups of
            completions that are spread over processes.
    """
    size, args = trainer.get_tp_size(), trainer.args
    if size == 1:
        return
    if args.use_vllm:
        raise ValueError(
            f"`use_vllm` is true and the model is split by tensor parallelism (`tp_size` is {size}). vLLM gives every "
            "process completions of its own, and these must be the same: set `use_vllm=False`, or load the model "
            "without `tp_size` and split it with FSDP2."
        )
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            "`train_dataset` is streamed and the model is split by tensor parallelism, whose processes would get "
            "different prompts. Give a dataset with a length."
        )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ValueError(
            f"`num_generations` is {args.num_generations}, and a process generates {rows} completions at a time "
            "(`per_device_train_batch_size * steps_per_generation`). Under tensor parallelism the second must be a "
            "multiple of the first, so that every process has whole groups."
        )
    set_seed(args.seed + args.process_index // size)
