"""The configurations of TRL's trainers with the kernel flags, which are on by default.

Those of the alignment trainers also say how batches run without padding, and prompts once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from accelerate import ParallelismConfig
from transformers import TrainingArguments
from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class PackingFlags(KernelFlags):
    """The flags of [`KernelFlags`], and how a batch is packed.

    Losses, metrics and gradients are those of the padded batch.

    Args:
        padding_free (`bool`, *optional*):
            Whether the models run on one row without padding, in place of a padded batch. By default, and with `True`,
            they do where a small copy of the model is proved to compute the same; the report says why another does
            not. `False` leaves batches padded.
        tokens_per_micro_batch (`int`, *optional*):
            At most this many tokens in a forward, without padding. A batch of more runs as several forwards, all but
            the last of which are computed again in the backward, one at a time. The loss is that of the whole batch. A
            single sequence of more tokens is a forward of its own. Processes share the gradients of a batch once, so
            with FSDP and ZeRO each holds them whole between the forwards. By default a batch is one forward. Needs
            `padding_free`.

    Raises:
        ValueError: for a flag that is not a boolean, a `tokens_per_micro_batch` that is not a whole number above 0 or
            given with `padding_free=False`, and as [`KernelFlags`].
    """

    padding_free: bool | None = field(
        default=None,
        metadata={"help": "Whether models run on rows without padding. By default where that is proved right."},
    )
    tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "At most this many tokens in a forward; a batch of more runs as several. Needs `padding_free`."
        },
    )

    def __post_init__(self) -> None:
        _check_switch(self, "padding_free")
        tokens = self.tokens_per_micro_batch
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise ValueError(f"`tokens_per_micro_batch` is {tokens!r}; it must be a whole number, 1 or more.")
        if tokens is not None and self.padding_free is False:
            raise ValueError(
                f"`tokens_per_micro_batch` is {tokens}, but `padding_free` is false; leave one of the two out."
            )
        super().__post_init__()


@dataclass
class SharingFlags(PackingFlags):
    """The flags of [`PackingFlags`], for losses of several sequences that begin alike.

    Args:
        share_prompt (`bool`, *optional*):
            Whether sequences of a batch that begin alike, such as the completions of a prompt, are computed once up to
            where they differ. By default, and with `True`, they are where that is proved to give the same. Not while
            dropout is on, which would drop the same numbers for all of them. Needs `padding_free`.

    Raises:
        ValueError: for a `share_prompt` that is not a boolean, or true with `padding_free=False`, and as
            [`PackingFlags`].
    """

    share_prompt: bool | None = field(
        default=None,
        metadata={"help": "Whether the common beginning of sequences, such as a prompt, is computed once."},
    )

    def __post_init__(self) -> None:
        _check_switch(self, "share_prompt")
        if self.share_prompt and self.padding_free is False:
            raise ValueError("`share_prompt` is true, but `padding_free` is false; leave one of the two out.")
        super().__post_init__()


class RowsOfGroups:
    """Comes first in a configuration of TRL that counts processes: those that share each sequence count as one.

    TRL multiplies rows by processes where it divides completions into groups and steps. Under context or sequence
    parallelism (`cp_size`, `sp_size`) the processes of a group have the same rows. It would also refuse these sizes,
    for which our trainers cut sequences after generation.
    """

    parallelism_config: Any
    _alike = 1  # processes with equal rows

    @property
    def world_size(self) -> int:
        """The number of processes; while TRL checks its batches, of those with rows of their own."""
        return super().world_size // self._alike  # type: ignore[misc]

    def __post_init__(self) -> None:
        given = self.parallelism_config
        sizes = given or _parallelism_of_launch()
        if sizes is not None:
            self.parallelism_config, self._alike = None, sizes.cp_size * sizes.sp_size
        try:
            super().__post_init__()  # type: ignore[misc]
        finally:
            self.parallelism_config, self._alike = given, 1


class AllProcesses(TrainingArguments):
    """Comes last in a configuration with [`RowsOfGroups`]: transformers counts all processes, as DeepSpeed will."""

    _alike: int

    def __post_init__(self) -> None:
        alike, self._alike = self._alike, 1
        super().__post_init__()
        self._alike = alike


def _parallelism_of_launch() -> ParallelismConfig | None:
    """The sizes that `accelerate launch` has put into the environment, which an `Accelerator` takes if given none."""
    launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return ParallelismConfig() if launched else None


def _check_switch(args: Any, name: str) -> None:
    value = getattr(args, name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"`{name}` is {value!r}; it must be true, false, or left out.")


@dataclass
class LigerDistillationConfig(KernelFlags, DistillationConfig):
    """[`~trl.DistillationConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""


@dataclass
class LigerDPOConfig(SharingFlags, DPOConfig):  # type: ignore[misc]  # `padding_free` has a default of None here
    """[`~trl.DPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerGRPOConfig(RowsOfGroups, SharingFlags, GRPOConfig, AllProcesses):
    """[`~trl.GRPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerKTOConfig(PackingFlags, KTOConfig):
    """[`~trl.KTOConfig`] with the flags of [`PackingFlags`]; the kernels are on by default."""


@dataclass
class LigerRewardConfig(SharingFlags, RewardConfig):
    """[`~trl.RewardConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerRLOOConfig(RowsOfGroups, SharingFlags, RLOOConfig, AllProcesses):
    """[`~trl.RLOOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerSFTConfig(KernelFlags, SFTConfig):
    """[`~trl.SFTConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
