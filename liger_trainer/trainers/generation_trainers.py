"""`LigerGRPOTrainer` and `LigerRLOOTrainer`, and what they share: checks around generation, groups, split models.

TRL gives every process a seed and prompts of its own. The processes of a tensor or context parallel group train on the
same rows together, so they must get the same prompts, draw the same tokens for them, and count once (`rows_once.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import trl.trainer.grpo_trainer as trl_grpo_trainer
import trl.trainer.rloo_trainer as trl_rloo_trainer
from accelerate.utils import set_seed
from torch import nn
from trl import GRPOTrainer, RLOOTrainer

from liger_trainer.compat.accelerate import AUTOCAST_FORWARD
from liger_trainer.compat.private import available, require
from liger_trainer.compat.trl import (
    GRPO_GENERATION,
    GRPO_HEAD,
    GRPO_METRICS,
    LOGGED_COMPLETIONS,
    POLICY_LOSS,
    RLOO_GENERATION,
    RLOO_HEAD,
    RLOO_METRICS,
)
from liger_trainer.configs.loss_types import divided_by
from liger_trainer.configs.trl_configs import LigerGRPOConfig, LigerRLOOConfig
from liger_trainer.head.on_host import on_host
from liger_trainer.head.step import current_step, running
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.checks.trl_arguments import (
    check_completions,
    checked_reward_functions,
    warn_of_truncated_sampling,
)
from liger_trainer.trainers.deferred_metrics import GATHERING, DeferredMetrics, may_defer, nanmax, nanmin
from liger_trainer.trainers.grouping import GroupedCompletions
from liger_trainer.trainers.reference import ReferenceMixin
from liger_trainer.trainers.rows_once import rows_once
from liger_trainer.trainers.step import check_prompts, count_later, labels_of_parts

if TYPE_CHECKING:
    from trl import GRPOTrainer

    class _Base(ReferenceMixin, GRPOTrainer): ...
else:
    _Base = ReferenceMixin


_CHOOSING = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"}
"""The tensors of generated batches that say which tokens are scored."""


class GenerationMixin(_Base, GroupedCompletions):
    """Checks prompts before generation, completions after it (by a backend or a `rollout_func`), and rewards.

    It also counts the tokens of the completions for the head, which multiplies no others.
    """

    _generates = True
    _counts_labels = False  # `_get_per_token_logps_and_entropies` knows what each forward scores
    _forward_takes_parts = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = _checked_rollout(kwargs["rollout_func"])
        super().__init__(*args, **kwargs)
        seed_groups_alike(self)
        check_continuous_batching(self)
        warn_of_truncated_sampling(self)
        if available(LOGGED_COMPLETIONS):
            self._run_report.completions = self._logs

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        # Its batches have the prompts of all processes; the processes of a tensor-parallel group share theirs.
        sampler.batch_size //= self.get_tp_size()
        return sampler

    def _rows_once(self) -> contextlib.AbstractContextManager[None]:
        trl_module: Any = self.trl_module
        return rows_once(self, trl_module, self.get_tp_size() * self.get_cp_size())

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self._rows_once():
            generated = super()._generate_and_score_completions(*args, **kwargs)
        return self._known(generated)

    def _known(self, generated: dict[str, Any]) -> dict[str, Any]:
        """Completions with the values on the host of the tensors that say which tokens are scored."""
        if self._asks_host(self.model_wrapped):
            for name in _CHOOSING & generated.keys():
                generated[name] = on_host(generated[name], generated[name].cpu())
        return generated

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; its metrics are those of all rows."""
        with self._rows_once():
            return super().compute_loss(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        own = self.reward_funcs
        self.reward_funcs = checked_reward_functions(own)
        try:
            return super()._calculate_rewards(*args, **kwargs)
        finally:
            self.reward_funcs = own

    def _same_in_group(self, generated: Any) -> Any:
        """What the first of the processes that share each sequence has generated, on all of them."""
        if self._ranks is None:
            return generated
        said = [generated]
        dist.broadcast_object_list(said, group_src=0, group=self._group)
        return said[0]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        check_prompts(prompt_ids, self.accelerator.unwrap_model(self.model))
        with weights_come_back(self):
            generated = self._same_in_group(super()._generate_single_turn(prompt_ids, *args, **kwargs))
        if not getattr(self, "tools", None):  # after a tool's answer a turn may be empty
            completion_ids = generated[0] if isinstance(generated, tuple) else generated
            config: Any = self.args
            check_completions(completion_ids, "vLLM" if config.use_vllm else "Generation")
        return generated

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
        labels = labels_of_parts(attention_mask[:, -logits_to_keep:], batch_size) if counts else None
        bound = None if labels is None else count_later(labels)
        with running(replace(current_step(), labelled=bound)):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs
            )


def deferred_metrics(trainer: Any) -> DeferredMetrics | None:
    """Has a GRPO or RLOO `trainer` note its metrics on the device; None where it has to read them."""
    if not may_defer(trainer) or getattr(trainer, "use_adaptive_entropy", False):  # with which a metric is in the loss
        return None
    return DeferredMetrics(trainer, (*GATHERING, "reduce"), functions={"nanmin": nanmin, "nanmax": nanmax})


def check_continuous_batching(trainer: Any) -> None:
    """Checks that continuous batching can leave the weights of `trainer` in their dtype."""
    args, dtype = trainer.args, _dtype_of_generation(trainer.args)
    if dtype is None or not trainer.is_fsdp_enabled:
        return
    name = next((name for name, each in trainer.model.named_parameters() if _is_cast(each, dtype)), None)
    if name is not None:
        raise ValueError(
            f"`use_transformers_continuous_batching` is true with `{'bf16' if args.bf16 else 'fp16'}` and FSDP: TRL "
            f"would cast the weights, such as {name!r}, to {dtype} for good. Load the model in {dtype}, or generate "
            "without continuous batching."
        )


@contextlib.contextmanager
def weights_come_back(trainer: Any) -> Iterator[None]:
    """Casts the weights to the dtype of mixed precision for continuous batching, and gives them back as they were.

    TRL casts all of them, the trained ones and the tables of rotations too, and leaves them so: fp32 weights lose 16 of
    their bits at the first generation, and each later update is rounded. Here TRL finds nothing to cast, buffers stay,
    and so do weights in 8 bits and fewer. accelerate's forward, which returns fp32, is taken off meanwhile: from
    transformers 5.24 on it fails on the pages of keys and values.
    """
    args, dtype = trainer.args, _dtype_of_generation(trainer.args)
    if dtype is None:
        yield
        return
    require(AUTOCAST_FORWARD)
    before, model = (args.bf16, args.fp16), trainer.model
    forward, original = vars(model).get("forward"), vars(model).get("_original_forward")
    own = [(each, each.data) for each in model.parameters() if _is_cast(each, dtype)]
    try:
        args.bf16 = args.fp16 = False
        for parameter, data in own:
            parameter.data = data.to(dtype)
        if original is not None:
            model.forward = original
        yield
    finally:
        args.bf16, args.fp16 = before
        if original is not None:
            model.forward = forward
        for parameter, data in own:
            parameter.data = data


def _dtype_of_generation(args: Any) -> torch.dtype | None:
    """What TRL would cast the weights to; None if it would not."""
    if args.use_vllm or not args.use_transformers_continuous_batching:
        return None
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def _is_cast(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return parameter.is_floating_point() and parameter.itemsize > 1 and parameter.dtype != dtype


def _checked_rollout(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(rollout_func)
    def checked(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = trainer._same_in_group(rollout_func(prompts, trainer))
        check_completions(output.get("completion_ids", ()), "`rollout_func`")
        return output

    return checked


def seed_groups_alike(trainer: Any) -> None:
    """Gives all processes that train on the same rows of a GRPO or RLOO `trainer` the same seed.

    Raises:
        ValueError: for what differs on the processes of a group, which share a tensor or each sequence: vLLM, tools,
            and under tensor parallelism a streamed dataset, and groups of completions that are spread over processes;
            where they share each sequence for a configuration that counts the processes of a group one by one.
    """
    tp_size, args = trainer.get_tp_size(), trainer.args
    size = tp_size * trainer.get_cp_size()
    if size == 1:
        return
    split = f"the model is split by tensor parallelism (`tp_size` is {tp_size})"
    if tp_size < size:
        option = trainer._ranks.option
        split = f"processes share each sequence (`{option}` is {size // tp_size})"
        _check_shared_sequences(trainer, option, split)
    if args.use_vllm:
        raise ValueError(
            f"`use_vllm` is true and {split}. vLLM gives every process completions of its own, and these must be the "
            "same: set `use_vllm=False`, or split the model with FSDP2 alone."
        )
    if tp_size > 1 and not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            f"`train_dataset` is streamed and {split}, whose processes would get different prompts. Give a dataset "
            "with a length."
        )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if tp_size > 1 and rows % args.num_generations:
        raise ValueError(
            f"`num_generations` is {args.num_generations}, and a process generates {rows} completions at a time "
            "(`per_device_train_batch_size * steps_per_generation`). Under tensor parallelism the second must be a "
            "multiple of the first, so that every process has whole groups."
        )
    set_seed(args.seed + args.process_index // size)


def _check_shared_sequences(trainer: Any, option: str, split: str) -> None:
    if not isinstance(trainer.args, trainer.config_class):
        raise ValueError(
            f"`args` is a {type(trainer.args).__name__} and {split}: its `generation_batch_size` counts each of them. "
            f"Give a {trainer.config_class.__name__}."
        )
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
        raise ValueError(
            f"`tools` or `environment_factory` is given and {split}: each of them would call the tools, and may get "
            f"other answers. Set `{option}=1`, or write a `rollout_func`, whose first answer all of them take."
        )


class LigerGRPOTrainer(GenerationMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`], group-relative policy optimisation, with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerGRPOConfig`], or a `GRPOConfig`, with which the kernels are on. Loss
    types, options and metrics are TRL's own code on log-probabilities that are computed without logits. The reference
    model, where there is one, gets the same kernels. Generation, with vLLM or without, runs the model as ever: its
    forward without the fused head, and its parameters under their names. An adapter on the LM head, which TRL refuses,
    is trained. A reward function that raises, or returns anything but one number or None a completion, is a
    [`RewardError`] that names the function and the sample.

    Raises:
        TypeError: for `args` of another trainer.
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    trl_module = trl_grpo_trainer
    config_class = LigerGRPOConfig

    @parameters_of(GRPOTrainer.__init__, LigerGRPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(GRPO_HEAD)
        require(GRPO_GENERATION)
        super().__init__(*args, **kwargs)
        self._deferred = deferred_metrics(self) if available(GRPO_METRICS) else None

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss; `policy_loss` is logged as a mean over the step, whatever the loss type."""
        metrics = self._metrics["train"]
        before = len(metrics.get("policy_loss", ()))
        loss = super().compute_loss(*args, **kwargs)
        if divided_by(self.loss_type) == "step" and available(POLICY_LOSS):  # as TRL logs it too
            steps = getattr(self, "current_gradient_accumulation_steps", 1)  # none in an evaluation before training
            for place in range(before, len(metrics.get("policy_loss", ()))):
                metrics["policy_loss"][place] *= steps
        return loss


class LigerRLOOTrainer(GenerationMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`], REINFORCE leave-one-out, with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerRLOOConfig`], or a `RLOOConfig`, with which the kernels are on. Loss,
    reference, generation, rewards, adapters and errors are as in [`LigerGRPOTrainer`].
    """

    trl_module = trl_rloo_trainer
    config_class = LigerRLOOConfig

    @parameters_of(RLOOTrainer.__init__, LigerRLOOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(RLOO_HEAD)
        require(RLOO_GENERATION)
        super().__init__(*args, **kwargs)
        self._deferred = deferred_metrics(self) if available(RLOO_METRICS) else None
