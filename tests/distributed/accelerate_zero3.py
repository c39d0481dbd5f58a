"""ZeRO-3 on models so small that DeepSpeed would not split them, on any machine; how often it gathers the head."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def spare_compilation() -> None:
    """Spares the compilation of DeepSpeed's own all-reduce for CPUs, which takes minutes and a compiler."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def release_groups() -> None:
    """Lets this process train with `sp_size` again; DeepSpeed makes the groups for it once."""
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import _release_sequence_parallel_groups
    from deepspeed.utils import groups

    _release_sequence_parallel_groups()
    groups.mpu = None


def split_everything() -> None:
    """Makes ZeRO-3 split every parameter, and drop it right after use, as it does where a model is large.

    By default it keeps those below 100000 elements whole, and a billion elements from the forward to the backward. Its
    buffer for gradients, of 2 GB, becomes as small as the models.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    create, optimize = DeepSpeedZeRoOffload.__init__, DeepSpeedZeroOptimizer_Stage3.__init__

    def dropping(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **{**kwargs, "max_reuse_distance": 0, "max_live_parameters": 0})

    def frugal(self: Any, *args: Any, **kwargs: Any) -> None:
        optimize(self, *args, **{**kwargs, "reduce_bucket_size": 10**6})

    DeepSpeedZeroOptimizer_Stage3.__init__ = frugal
    DeepSpeedZeRoOffload.__init__ = dropping
    DeepSpeedZeRoOffload.mark_persistent_parameters = lambda self, *thresholds: []


def gathers_of_head(trainer: Any) -> list[int]:
    """A list that gets, of every optimizer step, how often ZeRO-3 gathered the weight of the LM head."""
    counted: list[int] = []
    if HAS_DEEPSPEED and trainer.is_deepspeed_enabled:
        trainer.add_callback(_Gathers(trainer, counted))
    return counted


class _Gathers(TrainerCallback):
    def __init__(self, trainer: Any, counted: list[int]) -> None:
        from deepspeed.runtime.zero import partition_parameters

        self.trainer, self.counted, self.now, self.weight = trainer, counted, 0, None
        for handle in (partition_parameters.AllGatherHandle, partition_parameters.AllGatherCoalescedHandle):
            watch(handle, self._saw)

    def _saw(self, parameters: list[Any]) -> None:
        self.now += any(parameter is self.weight for parameter in parameters)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        head = self.trainer.accelerator.unwrap_model(self.trainer.model).get_output_embeddings()
        self.weight, self.now = getattr(head, "base_layer", head).weight, 0
        status = getattr(self.weight, "ds_status", None)  # of ZeRO-3 alone
        assert status is None or status.name == "NOT_AVAILABLE", "the head's weight is whole between two steps"

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.counted.append(self.now)


def watch(handle: Any, saw: Callable[[list[Any]], None]) -> None:
    """Tells `saw` which parameters every `handle` gathers, from now on."""
    create = handle.__init__

    @functools.wraps(create)  # whose signature the next one asks for
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        given = inspect.signature(create).bind(self, *args, **kwargs).arguments
        saw(given["params"] if "params" in given else [given["param"]])

    handle.__init__ = watched
