"""The completions of a prompt next to each other, so that one forward can compute their prompt once.

TRL shuffles the completions that it has generated, and splits them into micro-batches. Here the shuffle is followed by
a second permutation. It moves each completion behind the first one of its prompt, but never into another optimizer
step, so that the step's gradient is the same sum in another order.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from liger_trainer.compat.rebound import forward_calling
from liger_trainer.configs.loss_types import divided_by

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from liger_trainer.trainers.trl_mixin import LigerTRLMixin

    class _Base(LigerTRLMixin, GRPOTrainer): ...
else:
    _Base = Trainer

logger = logging.getLogger("liger_trainer")

_Batch = dict[str, Any]  # tensors, lists and None; all but tensors without dimensions have one entry a completion


class GroupedCompletions(_Base):
    """Comes before TRL's `GRPOTrainer` or `RLOOTrainer`, whose `_prepare_inputs` it runs with another shuffle.

    Nothing else changes: what is sampled, the random numbers, and the sums over a step. Logged means over the tokens of
    a micro-batch (`entropy`, `kl`, `clip_ratio/*`) are means over other micro-batches.
    """

    @property
    def _shares_prompt(self) -> bool:
        """Whether the forward of a training step computes a shared prompt once."""
        return self._packing is not None and self._packing.shares_in_training(self.model)

    @functools.cached_property
    def _groups_completions(self) -> bool:
        """Whether completions are moved: where prompts are shared and no normalisation sees it, or if asked for.

        A term that is normalised in each micro-batch, as the mean over its tokens of `loss_type: bnpo`, depends on
        which completions are in it. TRL draws that at random, so no choice is the right one, but the numbers are
        others. They stay those of TRL unless `share_prompt=True` is given.
        """
        asked = getattr(self.args, "share_prompt", None)
        if not self._shares_prompt or asked is not None:
            return self._shares_prompt and bool(asked)
        term = _normalised_by_micro_batch(self)
        if term is not None and self.is_world_process_zero():
            logger.warning(
                "The completions of a prompt stay in different micro-batches, where they cannot share it, since %s "
                "would change. `share_prompt=True` puts them together.",
                term,
            )
        return term is None

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepare: Any = super()._prepare_inputs
        if self._groups_completions:
            args: Any = self.args
            trl_module: Any = self.trl_module
            # Optimizer steps begin at multiples of this, also after a shorter one at the end of an epoch.
            together = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
            shuffle = _grouping_shuffle(trl_module.shuffle_sequence_dict, args.steps_per_generation, together)
            prepare = forward_calling(prepare.__func__, "shuffle_sequence_dict", shuffle).__get__(self)  # type: ignore[union-attr]
        return prepare(inputs)


def _normalised_by_micro_batch(trainer: Any) -> str | None:
    """A term of the trainer's loss that depends on which completions share a micro-batch; None if there is none."""
    args = trainer.args
    loss_type = getattr(args, "loss_type", None)  # RLOO has one loss, a mean over completions
    # The ratios of vLLM's importance sampling and the KL divergence are of tokens or rows, and weighed as these are.
    terms = {
        f"`loss_type: {loss_type}`": loss_type is not None and divided_by(loss_type) in ("micro-batch", ""),
        "the entropy bonus": getattr(args, "entropy_coef", 0.0) != 0.0 or getattr(args, "use_adaptive_entropy", False),
        "the threshold of `top_entropy_quantile`": getattr(args, "top_entropy_quantile", 1.0) < 1.0,
        "the load-balancing loss of the routers": trainer.aux_loss_enabled,
        "the z-loss of the routers": trainer._z_loss is not None,
        "a loss of your own": type(trainer)._compute_loss.__module__ != trainer.trl_module.__name__,
    }
    return next((term for term, present in terms.items() if present), None)


@functools.cache  # like the copies of `_prepare_inputs`, which call it
def _grouping_shuffle(shuffle: Callable[[_Batch], _Batch], steps: int, together: int) -> Callable[[_Batch], _Batch]:
    """TRL's `shuffle`, and then `grouped` in every `together` of the `steps` micro-batches of a generation."""

    def shuffle_sequence_dict(batch: _Batch) -> _Batch:
        shuffled = shuffle(batch)  # draws TRL's permutation
        return grouped(shuffled, len(shuffled["prompt_ids"]) // steps * together)

    return shuffle_sequence_dict


def grouped(batch: _Batch, window: int) -> _Batch:
    """Moves the completions of a prompt behind its first one, within windows of rows; the order stays otherwise.

    Args:
        batch: The generated batch. `prompt_ids` and `prompt_mask`, both (rows, tokens), tell equal prompts. A batch
            with `pixel_values` is returned as it is: the forward shares no prompt with an image.
        window: Number of rows that may be exchanged with each other.
    """
    if "pixel_values" in batch:
        return batch
    prompts = [tuple(row) for row in torch.cat([batch["prompt_ids"], batch["prompt_mask"]], dim=1).tolist()]
    windowed = [(row // window, prompt) for row, prompt in enumerate(prompts)]
    first: dict[Any, int] = {}
    places = [first.setdefault(key, row) for row, key in enumerate(windowed)]
    order = sorted(range(len(places)), key=places.__getitem__)

    def reordered(values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            return values[order] if values.ndim else values
        return None if values is None else [values[row] for row in order]

    return {name: reordered(values) for name, values in batch.items()}
