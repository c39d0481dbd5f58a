"""What a trainer refuses of how it was launched: splits of a model that its loss, or the model, does not support."""

from __future__ import annotations

from typing import Any

from liger_trainer.integration import data_parallel_message


def check_launch(trainer: Any, takes_parts_of_sequences: bool) -> None:
    """Checks that the launch suits the trainer.

    Args:
        trainer: After the construction of the Hugging Face trainer below it.
        takes_parts_of_sequences: Whether its loss is right where each process has a part of every sequence.

    Raises:
        ValueError: for several GPUs in one process, for context or sequence parallelism where the loss needs whole
            sequences, and for a model that `from_pretrained` has split and the launch would split again.
    """
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise ValueError(data_parallel_message(name))
    for option, size in (("cp_size", trainer.get_cp_size()), ("sp_size", trainer.get_sp_size())):
        if size > 1 and not takes_parts_of_sequences:
            raise ValueError(
                f"`parallelism_config` has `{option}={size}`, which gives every process a part of each sequence; the "
                f"loss of {name} needs whole ones. Set `{option}=1` and split the model with FSDP2 or tensor "
                "parallelism, or train with LigerTrainer or LigerSFTTrainer."
            )
    if trainer.is_distributed_loading_by_transformers and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        again = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise ValueError(
            "`model` was split by `from_pretrained` (`distributed_config`), and the launch would split it again with "
            f"{again}. Launch it with `torchrun`, or `accelerate launch` with `--accelerate_config ddp`; "
            "`DistributedConfig(fsdp_size=...)` is FSDP2."
        )
