"""How the matrix spreads a model with DeepSpeed's ZeRO, and trains it."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.accelerate_zero3 import spare_compilation, split_everything


@functools.cache
def _deepspeed() -> Any:
    """DeepSpeed for processes on a CPU, with ZeRO-3 splitting parameters of any size."""
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), DS_ACCELERATOR="cpu")
    import deepspeed

    spare_compilation()
    split_everything()
    return deepspeed


@functools.cache
def _in_group(group: Any) -> Any:
    """DeepSpeed in the process's `group`, which a cell that failed has left it with another of."""
    from deepspeed.utils import groups

    deepspeed = _deepspeed()
    deepspeed.comm.comm.cdb = groups._WORLD_GROUP = None
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def zero(model: nn.Module, dtype: torch.dtype | None, stage: int) -> nn.Module:
    """`model` in DeepSpeed's engine, in the dtype of its weights; the optimizer is the engine's."""
    from tests.distributed.matrix import LEARNING_RATE

    in_bf16 = next(model.parameters()).dtype == torch.bfloat16
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6},  # by default, a buffer of 2 GB
        "bf16": {"enabled": in_bf16},
        "gradient_clipping": 0.0,  # 1 by default
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    engine, *_ = _in_group(dist.group.WORLD).initialize(model=model, optimizer=optimizer, config=config)
    return engine


def is_engine(wrapped: Any) -> bool:
    """Whether `wrapped` is one of `zero`."""
    return hasattr(wrapped, "set_gradient_accumulation_boundary")


def whole_weight(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter on all processes, in fp32 as the optimizer keeps it."""
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)


def whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, after the reduction."""
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)
