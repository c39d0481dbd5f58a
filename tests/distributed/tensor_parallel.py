"""Tiny models as transformers' tensor parallelism loads them, on gloo processes, beside one process's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests.distributed.matrix_batches import BATCHES, LOSSES, Batch, concatenated, naive_loss, product_loss
from tests.distributed.matrix_models import inner_model
from tests.patching.mixing_models import built
from tests.tiny_models import TINY_MODELS, _causal

IGNORE = -100


class BiasedLlama(LlamaForCausalLM):
    """A llama whose head has a bias."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()


_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
_SHARED = {"first_k_dense_replace": 1, "n_shared_experts": 1}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    **TINY_MODELS,
    "biased llama": _causal(LlamaConfig, BiasedLlama),
    "deepseek_v3": _causal(
        *(DeepseekV3Config, DeepseekV3ForCausalLM), **{**_ROUTED, **_SHARED, **_LATENT, "num_key_value_heads": 4}
    ),
    "glm4_moe": _causal(Glm4MoeConfig, Glm4MoeForCausalLM, **_ROUTED, **_SHARED, head_dim=8),
    "qwen2_moe": _causal(Qwen2MoeConfig, Qwen2MoeForCausalLM, **_SPARSE, shared_expert_intermediate_size=24),
    "olmoe": _causal(OlmoeConfig, OlmoeForCausalLM, **_SPARSE),
    "nemotron_h": _causal(
        *(NemotronHConfig, NemotronHForCausalLM),
        **{**_ROUTED, "layers_block_type": ["moe", "attention"], "moe_shared_expert_intermediate_size": 24},
    ),
    **{name: functools.partial(built, name, use_cache=False) for name in ("qwen3_5_text", "qwen3_5_moe_text", "lfm2")},
    "mamba 2": functools.partial(built, "nemotron_h", use_cache=False),
}
"""`TINY_MODELS`, and those that only these tests need."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Args:
        family: A key of `FAMILIES`.
        loss: A key of the matrix's `LOSSES`.
        overrides: Fields of the model's configuration.
        kernels: `liger_kernel_config`.
        lora: Target modules of adapters; none by default.
        autocast: dtype of autocast around the forward.
        whole_logits: Whether the logits are expected to be built.
        tolerance: The largest error of loss and gradients, relative to the size of each.
    """

    family: str = "llama"
    loss: str = "labels"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    whole_logits: bool = False
    tolerance: float = 1e-4


def load_split(whole: Any, **config: Any) -> Any:
    """`whole`, loaded again with every rank's part of it, as `from_pretrained` splits it by `DistributedConfig`."""
    from transformers.distributed import DistributedConfig

    folders: list[Any] = [None]
    if dist.get_rank() == 0:
        folders = [tempfile.mkdtemp()]
        whole.save_pretrained(folders[0])
    dist.broadcast_object_list(folders)
    split = type(whole).from_pretrained(Path(folders[0]), distributed_config=DistributedConfig(**config))
    return split.train()


def with_adapters(model: Any, targets: tuple[str, ...]) -> Any:
    """`model` with LoRA on `targets`, the same on every rank, split as PEFT splits it."""
    from peft import LoraConfig, get_peft_model

    if not targets:
        return model
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path:
                wave = torch.arange(parameter.numel(), dtype=torch.float32).mul(0.7).cos() * 0.1
                parameter.copy_(whole_like(wave.view(parameter.shape), parameter))
    return adapted.train()


def whole_like(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """`tensor`, split as `parameter` is."""
    if not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: Any) -> torch.Tensor:
    """`tensor`, gathered."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients of all parameters that have one, by name."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_near(name: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float, floor: float = 0.0) -> None:
    """Raises where the two differ by more than `tolerance`, relative to the size of `expected`, or to `floor`."""
    error, size = (ours.float() - expected.float()).norm().item(), max(expected.norm().item(), floor)
    assert error <= tolerance * size, f"{name} is off by {error:.2e} of {size:.2e}"


def assert_same_gradients(ours: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Raises where a gradient is missing or differs; very small ones are known to a hundredth of all together."""
    assert ours.keys() == expected.keys(), ours.keys() ^ expected.keys()
    floor = 1e-2 * torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    for name, gradient in expected.items():
        assert_near(f"the gradient of {name}", ours[name], gradient, tolerance, floor)


@contextlib.contextmanager
def counted_logits() -> Iterator[dict[str, int]]:
    """Counts the logits that are deferred, and built, in this process."""
    from liger_trainer.head import DeferredLogits

    seen = {"deferred": 0, "built": 0}
    create, compute = DeferredLogits.create, DeferredLogits._compute

    def counted_create(*args: Any) -> Any:
        seen["deferred"] += 1
        return create(*args)

    def counted_compute(self: Any) -> Any:
        seen["built"] += 1
        return compute(self)

    DeferredLogits.create, DeferredLogits._compute = staticmethod(counted_create), counted_compute  # type: ignore
    try:
        yield seen
    finally:
        DeferredLogits.create, DeferredLogits._compute = staticmethod(create), compute  # type: ignore


class Gathers(TorchDispatchMode):
    """Notes the shapes of all tensors that are gathered from the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "all_gather" in str(func):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def batch_of(case: Case, step: int = 0) -> Batch:
    """Rows of unequal length; ids below 64, which every vocabulary has."""
    batch = concatenated(list(itertools.chain(*BATCHES["unequal"](step))))
    if case.family == "gemma3":
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return batch


def kernels_in(model: nn.Module, case: Case) -> nn.Module:
    """`model` with the kernels of `case`, and with the fused head of TRL's trainers where the loss is one of theirs."""
    from liger_trainer import apply_liger_kernel
    from liger_trainer.trainers.fused_forward import StatisticsOptions
    from liger_trainer.trainers.trl_mixin import install_fused_forward

    chunk = 8 * inner_model(model).config.get_text_config().vocab_size * 4
    apply_liger_kernel(model, {"logits_memory": chunk, **case.kernels})
    options = LOSSES[case.loss].options
    if options is not None:
        install_fused_forward(inner_model(model), StatisticsOptions(**options))
    return model


def expected_step(case: Case, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process that runs the unpatched model in fp32 on whole logits."""
    whole, loss = FAMILIES[case.family](**case.overrides).train().to(batch["labels"].device), LOSSES[case.loss]
    model = with_adapters(whole, case.lora)
    value = naive_loss(model, batch, loss, loss.count([batch]))
    value.backward()
    return value.item(), gradients(model)


def check_step(
    model: nn.Module, case: Case, batches: list[Batch], of_rank: int = 0, gathers: Gathers | None = None
) -> None:
    """Raises where a step of `model`, with its kernels, is not that of one process.

    Args:
        model: The model as it is spread.
        case: The model and its options.
        batches: A batch of each rank that has one of its own; the parameters get their mean gradient.
        of_rank: The place of this rank's batch among them.
        gathers: Watches the collectives of the step.
    """
    loss, device = LOSSES[case.loss], next(model.parameters()).device
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    expected, expected_gradients = expected_step(case, concatenated(batches))
    autocast = torch.autocast(device.type, dtype=case.autocast, enabled=case.autocast is not None)
    with counted_logits() as seen, gathers or contextlib.nullcontext():
        with autocast:
            value = product_loss(model, batches[of_rank], loss, loss.count(batches))
        (value * len(batches)).backward()
    total = value.detach().clone()
    if len(batches) > 1:
        dist.all_reduce(total)
        total = total * len(batches) / dist.get_world_size()  # the ranks of a tensor-parallel group have the same
    assert_near("the loss", total, torch.tensor(expected, device=device), case.tolerance)
    assert_same_gradients(gradients(model), expected_gradients, case.tolerance)
    assert (seen["built"] > 0 or seen["deferred"] == 0) == case.whole_logits, seen
