"""Every operator with small arguments, one line each, for the tests that all of them must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from liger_trainer import functional as ops
from liger_trainer.kernels.fp8.stored import Fp8Weight
from liger_trainer.kernels.lora.lora_products import Weight

Argument = Callable[[torch.Generator, torch.dtype], torch.Tensor]


def leaf(*shape: int) -> Argument:
    """Random numbers that need a gradient."""
    return lambda generator, dtype: torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def table(*shape: int) -> Argument:
    """Random numbers that need none."""
    return lambda generator, dtype: torch.rand(shape, generator=generator).to(dtype)


def labels(high: int, *shape: int) -> Argument:
    """Random ids below `high`, the last one ignored."""
    return lambda generator, dtype: torch.cat(
        [torch.randint(0, high, (*shape[:-1], shape[-1] - 1), generator=generator), torch.full((*shape[:-1], 1), -100)],
        dim=-1,
    )


def ids(high: int, *shape: int) -> Argument:
    """Random ids below `high`."""
    return lambda generator, dtype: torch.randint(0, high, shape, generator=generator)


def probabilities(*shape: int, log: bool = False, needs_gradient: bool = False) -> Argument:
    """Random distributions over the last dimension, or their logarithms."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        logits = torch.randn(shape, generator=generator)
        values = logits.log_softmax(-1) if log else logits.softmax(-1)
        return values.to(dtype).requires_grad_(needs_gradient)

    return make


@dataclasses.dataclass(frozen=True)
class Operator:
    """A function of tensors and its arguments.

    Args:
        function: A public function, or a closure over one.
        arguments: What makes them, in order.
        refuses: The function that the error about a second derivative names; None where there is one, or where another
            test asks for it.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    refuses: str | None = None

    def tensors(self, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
        """The arguments; floating ones of `dtype`."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [argument(generator, dtype) for argument in self.arguments]
        return [tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in tensors]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The outputs and, for upstream gradients of 0.5, the gradients of the arguments that need one."""
        outputs = self.function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        needed = [tensor for tensor in tensors if tensor.requires_grad]
        upstream = [torch.full_like(output, 0.5) for output in outputs]
        return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, needed, upstream)]


def _of_activations(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` of a first argument that is no leaf, so that it may be overwritten."""
    return lambda first, *rest: function(first * 1.0, *rest, **options)


def _with(function: Callable[..., Any], position: int, argument: Any) -> Callable[..., Any]:
    """`function` with `argument` put between its tensors."""
    return lambda *tensors: function(*tensors[:position], argument, *tensors[position:])


def _pair(result: ops.LogProbsOutput) -> tuple[torch.Tensor, torch.Tensor | None]:
    return result.log_probs, result.entropy


def _adapted(weight: Weight, a: torch.Tensor, b: torch.Tensor) -> ops.LoRALayer:
    return ops.LoRALayer(weight, None, (ops.LoRA(a, b, 0.5),))


def memory(*shape: int, high: int = 256) -> Argument:
    """Random bytes below `high`."""
    return lambda generator, dtype: torch.randint(high, shape, generator=generator).to(torch.uint8)


def scales(*shape: int) -> Argument:
    """Random numbers in fp32."""
    return lambda generator, dtype: torch.rand(shape, generator=generator)


def _in_4_bits(rows: int, columns: int, packed: torch.Tensor, *statistics: torch.Tensor) -> ops.NF4Weight:
    """A matrix out of its parts, doubly quantised where there are more than two."""
    absmax, code, *nested = statistics
    return ops.NF4Weight(packed, absmax, code, (rows, columns), 64, ops.NestedAbsmax(*nested) if nested else None)


def _nf4_mlp(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    sizes = ((24, 16), (24, 16), (16, 24))
    layers = [
        _adapted(_in_4_bits(*size, *parts[start : start + 3]), *parts[start + 3 : start + 5])
        for size, start in zip(sizes, (0, 5, 10))
    ]
    return ops.lora_mlp(x, *layers)


def _fp8_mlp(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    layers = [_adapted(Fp8Weight(*parts[i : i + 2]), *parts[i + 2 : i + 4]) for i in (0, 4, 8)]
    return ops.lora_mlp(x, *layers)


def _on_fp8(rows: int, columns: int) -> tuple[Argument, ...]:
    """Codes of e4m3 up to 14 and scales of a weight, and an adapter's factors."""
    return memory(rows, columns, high=0x58), scales(rows, 1), leaf(2, columns), leaf(rows, 2)


def _lora_mlp(x: torch.Tensor, *parameters: torch.Tensor, **options: Any) -> torch.Tensor:
    return ops.lora_mlp(x, *(_adapted(*parameters[i : i + 3]) for i in (0, 3, 6)), **options)


def _moe_experts(hidden: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor, **options: Any):
    index = torch.arange(2 * len(hidden), device=hidden.device).view(-1, 2) % 3
    for name, bias in zip(("gate_up_bias", "down_bias"), parameters[2:]):
        options[name] = bias
    return ops.moe_experts(hidden, index, weights, *parameters[:2], **options)


def _experts(*operands: torch.Tensor) -> torch.Tensor:
    """Experts whose projections have an adapter each."""
    *block, first_a, first_b, second_a, second_b = operands
    gate_up, down = ops.ExpertLoRA(first_a, first_b, 0.5), ops.ExpertLoRA(second_a, second_b, 2.0)
    return ops.moe_experts(*block, gate_up_adapters=[gate_up], down_adapters=[down])


_CE, _LCE = "cross_entropy", "linear_cross_entropy"
_LOGITS, _HEAD = (leaf(5, 70), labels(70, 5)), (leaf(5, 16), leaf(70, 16), labels(70, 5))
_CHUNK = 2 * 128 * 4  # bytes of two fp32 rows of logits, padded to 128 columns
_SCORES = (leaf(1, 2, 9, 9), leaf(2, 2, 3, 3), leaf(2))

_TEACHER = (table(5, 12), table(70, 12))
_HEADS = (leaf(5, 16), leaf(70, 16), *_TEACHER, labels(70, 5))
_LOG_Q, _LOG_P = probabilities(5, 70, log=True, needs_gradient=True), probabilities(5, 70, log=True)
_POLICY, _LLP = (labels(70, 2, 5), table(2)), "linear_log_probs"
_Q_K = (leaf(2, 3, 4, 8), leaf(2, 3, 2, 8))
_WIDENED, _NARROWED = (table(24, 16), leaf(2, 16), leaf(24, 2)), (table(16, 24), leaf(2, 24), leaf(16, 2))
_NF4 = (memory(192, 1), scales(6), scales(16))
_NESTED = (memory(192, 1), memory(6), scales(16), scales(256), scales(1), scales())
_ROUTER = "topk_softmax_routing and grouped_topk_sigmoid_routing"
_EXPERTS = (leaf(6, 16), table(6, 2), leaf(3, 24, 16), leaf(3, 16, 12))
_ADAPTED = (leaf(6, 16), ids(3, 6, 2), leaf(6, 2), leaf(3, 48, 16), leaf(3, 16, 24))
_ON_EXPERTS = (leaf(3, 2, 16), leaf(3, 48, 2), leaf(3, 3, 24), leaf(3, 16, 3))
_ROUTERS = (leaf(6, 5), leaf(6, 5))
_VISION = (leaf(6, 4, 8), leaf(6, 2, 8), table(6, 8), table(6, 8))

OPERATORS: dict[str, Operator] = {
    "rms_norm": Operator(ops.rms_norm, (leaf(6, 32), leaf(32)), "rms_norm"),
    "fused_add_rms_norm": Operator(ops.fused_add_rms_norm, (leaf(6, 32), leaf(6, 32), leaf(32)), "fused_add_rms_norm"),
    "layer_norm": Operator(ops.layer_norm, (leaf(6, 32), leaf(32), leaf(32)), "layer_norm"),
    "rope": Operator(ops.rope, (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), table(1, 3, 8), table(1, 3, 8))),
    "swiglu": Operator(ops.swiglu, (leaf(6, 24), leaf(6, 24)), "swiglu"),
    "swiglu_fused": Operator(ops.swiglu_fused, (leaf(6, 48),), "swiglu"),
    "geglu": Operator(ops.geglu, (leaf(6, 24), leaf(6, 24)), "geglu"),
    "geglu_fused": Operator(ops.geglu_fused, (leaf(6, 48),), "geglu"),
    "softmax": Operator(ops.softmax, (leaf(6, 50),), "softmax"),
    "sparsemax": Operator(ops.sparsemax, (leaf(6, 50),), "sparsemax"),
    "sparsemax, dim": Operator(partial(ops.sparsemax, dim=0), (leaf(6, 50),), "sparsemax"),
    "multi_token_attention": Operator(partial(ops.multi_token_attention, padding=1), _SCORES, "softmax"),
    "multi_token_attention, sparse": Operator(partial(ops.multi_token_attention, sparse=True), _SCORES, "sparsemax"),
    "cross_entropy": Operator(ops.cross_entropy, _LOGITS, _CE),
    "cross_entropy, none": Operator(partial(ops.cross_entropy, reduction="none", softcap=4.0), _LOGITS, _CE),
    "cross_entropy, expected": Operator(partial(ops.cross_entropy, expected_grad=0.5), _LOGITS, _CE),
    "cross_entropy, in place": Operator(_of_activations(ops.cross_entropy, inplace=True), _LOGITS, _CE),
    "linear_cross_entropy": Operator(ops.linear_cross_entropy, _HEAD, _LCE),
    "linear_cross_entropy, none": Operator(partial(ops.linear_cross_entropy, reduction="none"), _HEAD, _LCE),
    "linear_cross_entropy, chunks": Operator(partial(ops.linear_cross_entropy, logits_memory=_CHUNK), _HEAD, _LCE),
    "fused_add_layer_norm": Operator(
        ops.fused_add_layer_norm, (leaf(6, 32), leaf(6, 32), leaf(32), leaf(32)), "fused_add_layer_norm"
    ),
    "modulated_rms_norm": Operator(
        ops.modulated_rms_norm, (leaf(2, 3, 32), leaf(32), leaf(2, 32), leaf(2, 32)), "modulated_rms_norm"
    ),
    "group_norm": Operator(_with(ops.group_norm, 1, 2), (leaf(2, 6, 10), leaf(6), leaf(6)), "group_norm"),
    "poly_norm": Operator(ops.poly_norm, (leaf(6, 32), leaf(3), leaf(1)), "poly_norm"),
    "dyt": Operator(ops.dyt, (leaf(6, 32), leaf(1), leaf(32), leaf(32)), "dyt"),
    "qk_norm_rope": Operator(
        ops.qk_norm_rope, (*_Q_K, leaf(8), leaf(8), table(1, 3, 8), table(1, 3, 8)), "qk_norm_rope"
    ),
    "rope, interleaved": Operator(
        partial(ops.rope, interleaved=True), (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), table(1, 3, 8), table(1, 3, 8))
    ),
    "rope_complex": Operator(
        lambda q, k, angles: ops.rope_complex(q, k, torch.polar(torch.ones_like(angles), angles).to(torch.complex64)),
        (*_Q_K, lambda generator, dtype: torch.rand(2, 3, 4, generator=generator)),
    ),
    "rope_multimodal": Operator(
        partial(ops.rope_multimodal, sections=[1, 2, 1]),
        (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), table(3, 2, 3, 8), table(3, 2, 3, 8)),
    ),
    "rope_vision": Operator(ops.rope_vision, _VISION),
    "clamped_swiglu": Operator(ops.clamped_swiglu, (leaf(6, 48),), "clamped_swiglu"),
    "relu_squared": Operator(ops.relu_squared, (leaf(6, 48),), "relu_squared"),
    "swiglu_down": Operator(ops.swiglu_down, (leaf(6, 24), leaf(6, 24), leaf(16, 24)), "swiglu_down"),
    "geglu_down": Operator(ops.geglu_down, (leaf(6, 24), leaf(6, 24), leaf(16, 24)), "geglu_down"),
    "lora_linear": Operator(_with(ops.lora_linear, 2, None), (leaf(6, 16), *_WIDENED), "lora_linear"),
    "lora_linears": Operator(
        lambda x, *layers: ops.lora_linears(x, [_adapted(*layers[:3]), _adapted(*layers[3:])]),
        (leaf(6, 16), *_WIDENED, *_WIDENED),
        "lora_linears",
    ),
    "lora_down": Operator(
        lambda gate, up, *down: ops.lora_down(gate, up, _adapted(*down)),
        (leaf(6, 24), leaf(6, 24), *_NARROWED),
        "lora_down",
    ),
    "lora_mlp": Operator(_lora_mlp, (leaf(6, 16), *_WIDENED, *_WIDENED, *_NARROWED), "lora_mlp"),
    "lora_mlp, GELU": Operator(
        partial(_lora_mlp, activation="tanh"), (leaf(6, 16), *_WIDENED, *_WIDENED, *_NARROWED), "lora_mlp"
    ),
    "lora_linear, 4 bits": Operator(
        lambda x, a, b, *parts: ops.lora_linear(x, _in_4_bits(24, 16, *parts), None, a, b),
        (leaf(6, 16), leaf(2, 16), leaf(24, 2), *_NESTED),
        "lora_linear",
    ),
    "lora_mlp, 4 bits": Operator(
        _nf4_mlp,
        (leaf(6, 16), *_NF4, *_WIDENED[1:], *_NF4, *_WIDENED[1:], *_NF4, *_NARROWED[1:]),
        "lora_mlp",
    ),
    "lora_mlp, fp8": Operator(
        _fp8_mlp,
        (leaf(6, 16), *_on_fp8(32, 16), *_on_fp8(32, 16), *_on_fp8(16, 32)),
        "lora_mlp",
    ),
    "nf4_dequantize": Operator(
        lambda x, *parts: x @ ops.nf4_dequantize(_in_4_bits(24, 16, *parts), x.dtype).T, (leaf(6, 16), *_NESTED)
    ),
    "sort_by_expert": Operator(lambda index, x: x[ops.sort_by_expert(index, 7).order], (ids(8, 5, 2), leaf(10, 4))),
    "tile_table": Operator(
        lambda index, x: x[ops.tile_table(ops.sort_by_expert(index, 7).offsets, 2, 10)[:, 1]],
        (ids(8, 5, 2), leaf(10, 4)),
    ),
    "topk_softmax_routing": Operator(lambda x: ops.topk_softmax_routing(x, 3)[0], (leaf(5, 12),), _ROUTER),
    "topk_softmax_routing, probabilities": Operator(
        lambda x: ops.topk_softmax_routing(x, 3, normalise=False)[0], (leaf(5, 12),), _ROUTER
    ),
    "grouped_topk_sigmoid_routing": Operator(
        lambda x, bias: ops.grouped_topk_sigmoid_routing(x, 3, correction_bias=bias, num_groups=4, top_groups=2)[0],
        (leaf(5, 12), table(12)),
        _ROUTER,
    ),
    "moe_experts": Operator(_moe_experts, _EXPERTS, "moe_experts"),
    "moe_experts, GPT-OSS": Operator(
        partial(_moe_experts, interleaved=True, transposed=True, limit=7.0, gate_multiplier=1.7, up_offset=1.0),
        (leaf(6, 16), table(6, 2), leaf(3, 16, 24), leaf(3, 12, 16), leaf(3, 24), leaf(3, 16)),
        "moe_experts",
    ),
    "moe_experts, no gate": Operator(
        partial(_moe_experts, gated=False, activation="relu_squared"),
        (leaf(6, 16), leaf(6, 2), leaf(3, 12, 16), leaf(3, 16, 12)),
        "moe_experts",
    ),
    "moe_experts, adapters": Operator(_experts, (*_ADAPTED, *_ON_EXPERTS), "moe_experts"),
    "load_balancing_loss": Operator(
        lambda *layers: ops.load_balancing_loss(layers, 2), _ROUTERS, "load_balancing_loss"
    ),
    "router_z_loss": Operator(lambda *layers: ops.router_z_loss(layers), _ROUTERS, "router_z_loss"),
    "router_losses": Operator(
        lambda logits, mask: tuple(ops.router_losses(logits, 2, mask)), (leaf(6, 5), table(2, 3)), "router_z_loss"
    ),
    "embedding": Operator(ops.embedding, (ids(70, 5), leaf(70, 16))),
    "tied_embedding": Operator(ops.tied_embedding, (ids(70, 5), leaf(70, 16))),
    "linear_log_probs": Operator(ops.linear_log_probs, _HEAD, _LLP),
    "log_probs": Operator(ops.log_probs, _LOGITS, "log_probs"),
    "log_probs, entropy": Operator(
        lambda *tensors: _pair(ops.log_probs(*tensors, softcap=4.0, outputs=("entropy",))), _LOGITS, "log_probs"
    ),
    "linear_log_probs, recomputed": Operator(partial(ops.linear_log_probs, retain_memory=0), _HEAD, _LLP),
    "linear_log_probs, frozen head": Operator(ops.linear_log_probs, (leaf(5, 16), table(70, 16), labels(70, 5)), _LLP),
    "linear_log_probs, chunks": Operator(
        lambda *head: _pair(ops.linear_log_probs(*head, outputs=("entropy",), logits_memory=_CHUNK)), _HEAD, _LLP
    ),
    "linear_jsd": Operator(ops.linear_jsd, _HEADS, "linear_jsd"),
    "linear_jsd, chunks": Operator(
        partial(ops.linear_jsd, hard_weight=0.5, logits_memory=2 * _CHUNK), _HEADS, "linear_jsd"
    ),
    "linear_kl": Operator(ops.linear_kl, _HEADS, "linear_kl"),
    "linear_kl_div": Operator(ops.linear_kl_div, (leaf(5, 16), leaf(70, 16), probabilities(5, 70)), "linear_kl_div"),
    "linear_cosine_distance": Operator(ops.linear_cosine_distance, _HEADS, "linear_cosine_distance"),
    "kl_div": Operator(ops.kl_div, (_LOG_Q, probabilities(5, 70)), "kl_div"),
    "jsd": Operator(ops.jsd, (_LOG_Q, _LOG_P), "jsd"),
    "jsd, none": Operator(partial(ops.jsd, reduction="none"), (_LOG_Q, _LOG_P), "jsd"),
    "tvd": Operator(ops.tvd, (probabilities(5, 70, needs_gradient=True), probabilities(5, 70)), "tvd"),
    "fused_ce_tvd": Operator(ops.fused_ce_tvd, (leaf(5, 70), table(5, 70), labels(70, 5))),
    "grpo_loss": Operator(
        lambda logits, completion, advantages: (
            ops.grpo_loss(logits, completion.clamp_min(0), advantages, completion_mask=completion != -100).loss
        ),
        (leaf(2, 5, 70), *_POLICY),
    ),
    "grpo_loss_from_log_probs": Operator(
        lambda log_probs, advantages: ops.grpo_loss_from_log_probs(log_probs, advantages).loss, (leaf(2, 5), table(2))
    ),
}
"""Each public function under its own name; after a comma, the same with other options."""
