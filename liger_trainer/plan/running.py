"""The plan of a trainer that exists, from its model and its arguments, without a recipe."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from liger_trainer.configs.flags import activation_memory_of, kernel_config_of
from liger_trainer.plan.estimate import ALLOCATOR_SLACK, largest_activation_memory
from liger_trainer.plan.parameters import count_parameters
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.work import HeadSettings, Run, Work, named_attention, read_layer_shape


def running(trainer: Trainer, shape: tuple[int, int]) -> tuple[Run, Setting]:
    """The run and the setting of a trainer whose micro-batches have ids of `shape`, rows and tokens.

    Only sizes of the model are read, and nothing is allocated.
    """
    args: Any = trainer.args
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    kernels, ours = kernel_config_of(args), args.use_liger_kernel
    rows, length = shape
    fused_adapters = bool(ours and kernels.lora and not getattr(model, "is_loaded_in_8bit", False))
    batch = args.per_device_train_batch_size
    head, reference = HeadSettings.of(args, _loss(trainer, model)), _bytes(getattr(trainer, "ref_model", None))
    work = Work(max(rows // batch, 1), length, length, head, reference)
    run = Run(
        count_parameters(model),
        read_layer_shape(model, fused_adapters, bool(ours and kernels.experts)),
        work,
        weight_bytes=model.get_input_embeddings().weight.element_size(),
        mixed=bool(args.bf16 or args.fp16),
        optim=str(getattr(args.optim, "value", args.optim)),
        optim_args=args.optim_args or "",
        implementation=named_attention(model),
        checkpoint_every=(args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1),
        recompute_mlp=bool(ours and kernels.recompute_mlp),
        sync_each_batch=trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False),
    )
    checkpointing = checkpoints_layers(trainer)
    offloads = checkpointing and getattr(args, "activation_offloading", False)
    strategy, sharing = _strategy(trainer, model)
    setting = Setting(
        strategy,
        args.world_size,
        batch,
        args.gradient_accumulation_steps,
        checkpointing,
        kernels.tiled_mlp,
        getattr(args, "activation_offloading_fraction", 1.0) if offloads else 0.0,
        sharing,
        replicas=_copies(trainer) if strategy == "fsdp2" else 1,
    )
    if checkpointing:
        setting = dataclasses.replace(setting, activation_memory=_activation_memory(args, run, setting))
    return run, setting


def checkpoints_layers(trainer: Any) -> bool:
    """Whether the layers are checkpointed, by the Trainer or by accelerate's FSDP plugin."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return bool(trainer.args.gradient_checkpointing or (plugin is not None and plugin.activation_checkpointing))


def _activation_memory(args: Any, run: Run, setting: Setting) -> int:
    """The bytes that checkpointed layers may keep; for ``"auto"``, what a plan leaves of the GPU."""
    budget = activation_memory_of(args)
    if budget != "auto":
        return budget or 0
    if args.device.type != "cuda":  # no other device's memory is counted
        return 0
    room = torch.cuda.get_device_properties(args.device).total_memory * (1 - ALLOCATOR_SLACK)
    return largest_activation_memory(run, setting, room)


def _loss(trainer: Any, model: Any) -> str:
    if model.get_output_embeddings() is None:
        return "none"
    return "cross_entropy" if getattr(trainer, "_name", "SFT") == "SFT" else "log_probs"


def _bytes(model: nn.Module | None) -> float:
    return 0.0 if model is None else float(sum(p.numel() * p.element_size() for p in model.parameters()))


def _strategy(trainer: Any, model: Any) -> tuple[str, int]:
    """How the model is split, and how many processes share a layer's experts."""
    if trainer.is_distributed_loading_by_transformers:
        split = model.config.distributed_config
        if split.ep_size == 1 or (split.tp_size, split.dp_replicate_size, split.pp_size) != (1, 1, 1):
            raise ValueError("A model that `from_pretrained` has split in this way is not planned.")
        return "expert_parallel", split.ep_size
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        kind += str(accelerator.state.deepspeed_plugin.zero_stage)
    elif kind == "FSDP":
        kind += str(accelerator.state.fsdp_plugin.fsdp_version)
    known = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP2": "fsdp2", "DEEPSPEED2": "zero2"}
    if kind not in known:
        raise ValueError(f"{kind} is not planned.")
    return known[kind], 1


def _copies(trainer: Any) -> int:
    """Copies of a model that FSDP2 splits: more than one under HSDP."""
    mesh = getattr(trainer.accelerator, "parallelism_config", None)
    return 1 if mesh is None else mesh.dp_replicate_size
