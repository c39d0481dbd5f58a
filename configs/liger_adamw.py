"""`optim: "liger_adamw"` of training arguments, and its `optim_args`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.training_args import OptimizerNames

LIGER_ADAMW = "liger_adamw"
NAMES = (LIGER_ADAMW, *(name.value for name in OptimizerNames))
"""What `optim` may be."""

_OPTIONS = ("states", "master", "seed")


@contextlib.contextmanager
def optim_of_transformers(args: Any) -> Iterator[None]:
    """Around the `__post_init__` of transformers' arguments, which refuses our name."""
    if args.optim not in NAMES:
        raise ValueError(f"`optim` is {args.optim!r}; it must be one of {', '.join(map(repr, NAMES))}.")
    if args.optim != LIGER_ADAMW:
        yield
        return
    args.optim = OptimizerNames.ADAMW_TORCH_FUSED
    yield
    args.optim = LIGER_ADAMW
    liger_adamw_options(args)
    if args.deepspeed_plugin is not None:
        raise ValueError(
            f"`optim` is {LIGER_ADAMW!r}, but the launch uses DeepSpeed, which keeps fp32 weights of its own; set "
            "`optim: adamw_torch_fused`."
        )


def liger_adamw_options(args: Any) -> dict[str, Any]:
    """The options of `LigerAdamW` in `optim_args`, such as `"states=bf16,master=none"`, with the run's `seed`."""
    from liger_trainer.optim.adamw import LigerAdamW

    options: dict[str, Any] = {"seed": args.seed}
    given = f"`optim_args` is {args.optim_args!r}"
    for pair in str(args.optim_args).replace(" ", "").split(",") if args.optim_args else ():
        name, _, value = pair.partition("=")
        if name not in _OPTIONS:
            raise ValueError(
                f"{given}; `optim: {LIGER_ADAMW}` takes 'states', 'master' and 'seed', such as "
                "'states=bf16,master=stochastic'. `adam_beta1` and the like are arguments of their own."
            )
        options[name] = int(value) if value.isdecimal() else None if value.lower() == "none" else value
    try:
        LigerAdamW([torch.zeros(1, requires_grad=True)], **options)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    return options
