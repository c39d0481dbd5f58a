"""Every operator with small arguments, one line each, for the tests that all of them must pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from liger_trainer import functional as ops
from liger_trainer.kernels.copied_rows import copied_rows, copies_of
from liger_trainer.kernels.documents import Documents, documents_of
from liger_trainer.kernels.fp8.linear import fp8_linear
from liger_trainer.kernels.fp8.stored import Fp8Weight, fp8_stored_linear
from liger_trainer.kernels.head.token_statistics import LOG_PROBS_OUTPUTS
from liger_trainer.kernels.lora.lora_products import Weight
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.kernels.lowbit.formats import PackedWeight, fp8_weight, int4_weight, mxfp4_weight, nvfp4_weight
from liger_trainer.liger.operators.row_softmax import row_softmax

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
        arguments: Functions that make the arguments, in order.
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


def powers(*shape: int) -> Argument:
    """Random bytes of e8m0, from 2^-9 to 2^-4."""
    return lambda generator, dtype: torch.randint(118, 124, shape, generator=generator).to(torch.uint8)


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


def _in_e4m3(rows: int, columns: int, codes: torch.Tensor, of_blocks: torch.Tensor) -> PackedWeight:
    """A weight in blocks of 16 x 16."""
    return fp8_weight(codes.view(rows, columns), of_blocks, (16, 16))


def _decoded(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """The product of x with a weight of each kind."""
    codes, of_blocks, blocks, powers, pairs, of_groups, words, of_words = parts
    weights = [
        _in_e4m3(24, 32, codes, of_blocks),
        mxfp4_weight(blocks, powers),
        nvfp4_weight(pairs, of_groups, of_blocks[0, :1], False),
        int4_weight(words.view(torch.int32), of_words, group=16),
    ]
    return torch.cat([x @ decode(weight, x.dtype).T for weight in weights], 1)


def _packed_experts(hidden: torch.Tensor, weights: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    first, second = mxfp4_weight(*parts[:2]), mxfp4_weight(*parts[2:4])
    adapters = [ops.ExpertLoRA(*parts[4:6], 0.5)], [ops.ExpertLoRA(*parts[6:8], 0.5)]
    return _moe_experts(hidden, weights, first, second, gate_up_adapters=adapters[0], down_adapters=adapters[1])


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

_TOKEN_STATES = (leaf(1, 6, 1, 16), leaf(1, 6, 1, 16), leaf(1, 6, 1, 16), leaf(1, 6, 1), leaf(1, 6, 1))


_FORK = documents_of([3, 2], [1, 4], [-1, 0], tokens=6)


def _forked(q: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule of a document that another one continues, behind a token of padding, and their last states."""
    k, v, g, beta, initial, spans, chunks = rest
    options = {"initial_state": initial.float(), "documents": Documents(spans, chunks, 1, True, 6), "final_state": True}
    return ops.delta_rule(q, k, v, -g.float().square(), beta, **options)


OPERATORS: dict[str, Operator] = {
    "rms_norm": Operator(ops.rms_norm, (leaf(6, 32), leaf(32)), "rms_norm"),
    "fused_add_rms_norm": Operator(ops.fused_add_rms_norm, (leaf(6, 32), leaf(6, 32), leaf(32)), "fused_add_rms_norm"),
    "layer_norm": Operator(ops.layer_norm, (leaf(6, 32), leaf(32), leaf(32)), "layer_norm"),
    "layer_norm, groups": Operator(
        lambda *given: ops.layer_norm(*given, 1e-5, 8), (leaf(6, 32), leaf(32), leaf(32)), "layer_norm"
    ),
    "gated_rms_norm": Operator(ops.gated_rms_norm, (leaf(6, 32), leaf(6, 32), leaf(32)), "gated_rms_norm"),
    "gated_rms_norm, groups": Operator(
        partial(ops.gated_rms_norm, group_size=8, gate_first=True),
        (leaf(6, 32), leaf(6, 32), leaf(32)),
        "gated_rms_norm",
    ),
    "short_conv": Operator(
        partial(ops.short_conv, activation="silu"), (leaf(2, 9, 6), leaf(6, 4), leaf(6)), "short_conv"
    ),
    "gated_short_conv": Operator(ops.gated_short_conv, (leaf(2, 9, 18), leaf(6, 3)), "gated_short_conv"),
    "delta_inputs": Operator(
        partial(ops.delta_inputs, key_heads=2, value_heads=4, key_dim=3, value_dim=5),
        (leaf(2, 9, 32), leaf(32, 4)),
        "delta_inputs",
    ),
    "delta_gates": Operator(ops.delta_gates, (leaf(2, 9, 3), leaf(2, 9, 3), leaf(3), leaf(3)), "delta_gates"),
    "rope": Operator(ops.rope, (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), table(1, 3, 8), table(1, 3, 8))),
    "delta_rule": Operator(
        lambda q, k, v, g, beta: ops.delta_rule(q, k, v, -g.float().square(), beta),
        (leaf(2, 5, 1, 16), leaf(2, 5, 1, 16), leaf(2, 5, 2, 16), leaf(2, 5, 2), leaf(2, 5, 2)),
        "delta_rule",
    ),
    "delta_rule, by channel": Operator(
        lambda q, k, v, g, beta: ops.delta_rule(q, k, v, -g.float().square(), beta),
        (leaf(2, 5, 1, 16), leaf(2, 5, 1, 16), leaf(2, 5, 2, 16), leaf(2, 5, 2, 16), leaf(2, 5, 2)),
        "delta_rule",
    ),
    "delta_rule, states": Operator(
        _forked,
        (*_TOKEN_STATES, leaf(1, 1, 16, 16), lambda *_: _FORK.spans, lambda *_: _FORK.chunks),
        "delta_rule",
    ),
    "state_space": Operator(
        lambda x, dt, A, B, C, D: ops.state_space(x, dt, -(A * A), B, C, D=D),
        (leaf(1, 5, 2, 16), leaf(1, 5, 2), leaf(2), leaf(1, 5, 1, 16), leaf(1, 5, 1, 16), leaf(2)),
        "state_space",
    ),
    "decayed_attention": Operator(
        ops.decayed_attention, (leaf(1, 5, 2, 16), leaf(1, 5, 2, 16), leaf(1, 5, 2, 16), table(2)), "decayed_attention"
    ),
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
    "rope, last columns": Operator(
        partial(ops.rope, first=5), (leaf(2, 4, 3, 11), leaf(2, 2, 3, 11), table(1, 3, 6), table(1, 3, 6))
    ),
    "expand_keys": Operator(partial(ops.expand_keys, nope=5), (leaf(2, 3, 4, 12), leaf(2, 3, 6))),
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
        partial(_lora_mlp, activation="gelu_tanh"), (leaf(6, 16), *_WIDENED, *_WIDENED, *_NARROWED), "lora_mlp"
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
    "lora_linear, packed": Operator(
        lambda x, a, b, *parts: ops.lora_linear(x, _in_e4m3(24, 16, *parts), None, a, b),
        (leaf(6, 16), leaf(2, 16), leaf(24, 2), memory(24, 16, high=0x58), scales(2, 1)),
        "lora_linear",
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
    "moe_experts, packed": Operator(
        _packed_experts,
        (
            *(leaf(5, 32), leaf(5, 2), memory(3, 64, 1, 16), powers(3, 64, 1), memory(3, 32, 1, 16), powers(3, 32, 1)),
            *(leaf(3, 2, 32), leaf(3, 64, 2), leaf(3, 2, 32), leaf(3, 32, 2)),
        ),
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


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers; of a matrix or more, the last two dimensions are transposed in memory."""
    return x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad) if x.dim() > 1 else x


def of_schema(operator: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the `custom` of one of our operators: named tuples among `arguments` as their fields."""
    values: list[Any] = []
    for place, argument in enumerate(arguments):
        values += argument if place in operator.records else [argument]
    return tuple(values)


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor], *positions: int) -> Operator:
    """The row `name`, with its arguments at `positions`, or all, changed."""
    row = OPERATORS[name]
    made = [
        (lambda *how, make=make: change(make(*how))) if place in positions or not positions else make
        for place, make in enumerate(row.arguments)
    ]
    return dataclasses.replace(row, arguments=tuple(made))


def _by_token(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` of heads that lie beside each other in memory, as a projection leaves them."""
    return lambda q, k, *tables: function(q.transpose(1, 2), k.transpose(1, 2), *tables, **options)


def _lora_layers(x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor, *parameters: torch.Tensor):
    """A layer with a bias, and one with dropout and two adapters."""
    first, second = (_adapted(*parameters[i : i + 3]) for i in (0, 3))
    adapters = second.adapters[0]._replace(mask=chosen < 0.5), ops.LoRA(*parameters[6:])
    return ops.lora_linears(x, (first._replace(bias=bias), second._replace(adapters=adapters)))


def _down_in_4_bits(gate: torch.Tensor, up: torch.Tensor, chosen: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    adapter = ops.LoRA(*parts[:2], mask=chosen < 0.5)
    return ops.lora_down(gate, up, ops.LoRALayer(_in_4_bits(16, 24, *parts[2:]), None, (adapter,)))


def _adapted_twice(hidden: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """Experts with biases and, on each projection, two adapters."""
    adapters = [ops.ExpertLoRA(*parameters[i : i + 2]) for i in (4, 6, 8, 10)]
    named = {"gate_up_adapters": adapters[:2], "down_adapters": adapters[2:]}
    return _moe_experts(hidden, weights, *parameters[:4], **named)


def _copied(x: torch.Tensor) -> torch.Tensor:
    copies = copies_of(torch.tensor([3, 0, 3, 5]), len(x))
    return copied_rows(x, type(copies)(*(part.to(x.device) for part in copies)))


def _conv_of_documents(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor):
    """With a child, a document of no tokens, padding, and states."""
    documents = ops.documents_of([3, 5, 0], parents=[-1, 0, -1], tokens=9, device=x.device)
    return ops.short_conv(x, weight, bias, residual=True, documents=documents, initial_state=state, final_state=True)


_NORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": ops.rms_norm,
    "fused_add_rms_norm": lambda x, weight: ops.fused_add_rms_norm(x, x.detach() * 2, weight)[0],
    "layer_norm": lambda x, weight: ops.layer_norm(x, weight, weight),
    "layer_norm, groups": lambda x, weight: ops.layer_norm(x, weight, weight, 1e-5, 8),
}
_LAYOUTS: dict[str, tuple[Argument, Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows": (leaf(3, 16), lambda x: x),
    "transposed heads": (leaf(2, 5, 3, 16), lambda x: x.transpose(1, 2)),
    "heads of a slice": (leaf(2, 5, 96), lambda x: x[..., :32].view(2, 5, 2, 16).transpose(1, 2)),
}
_FROZEN = {"dyt": (2,), "swiglu": (0,), "moe_experts": (2, 3), "moe_experts, GPT-OSS": (2, 3)}
_FROZEN |= {"moe_experts, no gate": (2, 3), "linear_cross_entropy": (1,)}
_STATISTICS = ("entropy", "predicted_tokens")
_BIASED = (*_HEAD, leaf(70))
_LOG_PROBS_OF_64 = (leaf(5, 16), leaf(64, 16), labels(64, 5), leaf(64))

VARIANTS: dict[str, Operator] = {
    "decode": Operator(
        _decoded,
        (
            *(leaf(6, 32), memory(24, 32, high=0x58), scales(2, 2)),
            *(memory(24, 1, 16), powers(24, 1), memory(24, 16), memory(24, 2, high=0x58)),
            *(memory(24, 16), scales(24, 2)),
        ),
    ),
    **{
        f"{norm}, {layout}, {'weight' if weight else 'no weight'}": Operator(
            lambda x, *weight, norm=_NORMS[norm], view=view: norm(view(x), *weight or (None,)), (make, *weight)
        )
        for norm, (layout, (make, view)) in itertools.product(_NORMS, _LAYOUTS.items())
        for weight in ((), (leaf(16),))
    },
    **{f"{name}, frozen": _changed(name, torch.Tensor.detach, *places) for name, places in _FROZEN.items()},
    **{
        f"{name}, transposed": _changed(name, transposed)
        for name in ("softmax", "moe_experts", "moe_experts, GPT-OSS", "lora_linears", "nf4_dequantize")
    },
    "fused_add_layer_norm, norm": Operator(
        lambda *given: ops.fused_add_layer_norm(*given)[0], OPERATORS["fused_add_layer_norm"].arguments
    ),
    "gated_rms_norm, transposed heads": Operator(
        lambda x, gate, weight: ops.gated_rms_norm(
            x.transpose(1, 2), gate.transpose(1, 2), weight, 1e-5, 4, "sigmoid", True, "gemma"
        ),
        (leaf(2, 5, 3, 16), leaf(2, 5, 3, 16), leaf(16)),
    ),
    "gated_rms_norm, gate": Operator(ops.gated_rms_norm, (table(3, 16), leaf(3, 16), table(16))),
    "modulated_rms_norm, scale of a token": Operator(
        _with(ops.modulated_rms_norm, 1, None), (leaf(9, 32), leaf(9, 32))
    ),
    "group_norm, no bias": Operator(_with(ops.group_norm, 1, 2), (leaf(2, 6, 10), leaf(6))),
    "causal_softmax": Operator(lambda x: row_softmax(x.mT.bfloat16(), False, True), (leaf(2, 5, 5),)),
    "fused_ce_tvd, bf16": Operator(
        lambda x, *rest: ops.fused_ce_tvd(x.bfloat16(), *rest), OPERATORS["fused_ce_tvd"].arguments
    ),
    "embedding, second derivative": Operator(
        lambda *given: torch.autograd.grad(ops.embedding(*given).square().sum(), given[1], create_graph=True)[0],
        (ids(5, 3, 4), leaf(5, 6)),
    ),
    "short_conv, documents": Operator(_conv_of_documents, (leaf(1, 9, 6), leaf(6, 4), leaf(6), leaf(2, 3, 6))),
    "short_conv, taps": Operator(ops.short_conv, (table(1, 9, 6), leaf(6, 4))),
    "copied_rows": Operator(_copied, (leaf(8, 3, 4),)),
    "copied_rows, transposed": Operator(lambda x: _copied(x.transpose(0, 2)), (leaf(4, 3, 8),)),
    "relu_squared, in place": Operator(_of_activations(ops.relu_squared, inplace_backward=True), (leaf(3, 7),)),
    "swiglu, in place": Operator(
        lambda gate, up: ops.swiglu(gate * 1.0, up * 1.0, inplace_backward=True), (leaf(3, 7), leaf(3, 7))
    ),
    "geglu, halves": Operator(lambda x: ops.geglu(*x.chunk(2, -1)), (leaf(3, 8),)),
    "clamped_swiglu, in place": Operator(_of_activations(ops.clamped_swiglu, inplace_backward=True), (leaf(3, 8),)),
    "swiglu_down, bias": Operator(ops.swiglu_down, (leaf(2, 3, 7), leaf(2, 3, 7), leaf(5, 7), leaf(5))),
    "geglu_down, fused": Operator(_with(ops.geglu_down, 1, None), (leaf(2, 3, 14), leaf(5, 7))),
    "rope, unsqueeze_dim": Operator(partial(ops.rope, unsqueeze_dim=2), (*_Q_K, table(2, 3, 6), table(2, 3, 6))),
    "rope, by token": Operator(_by_token(ops.rope), (*_Q_K, table(1, 3, 6), table(1, 3, 6))),
    "rope, split": Operator(
        _by_token(ops.rope, rotary_dim=8, interleaved=True, split_output=True), (*_Q_K, table(1, 3, 4), table(1, 3, 4))
    ),
    "rope, split, last columns": Operator(
        _by_token(ops.rope, rotary_dim=4, interleaved=True, split_output=True, first=4),
        (*_Q_K, table(1, 3, 2), table(1, 3, 2)),
    ),
    "rope_complex, last columns": Operator(
        lambda q, k, angles: ops.rope_complex(q, k, torch.polar(torch.ones_like(angles), angles), first=2),
        (*_Q_K, lambda generator, dtype: torch.rand(2, 3, 3, generator=generator)),
    ),
    "expand_keys, strided": Operator(
        lambda kv, r: ops.expand_keys(kv.transpose(1, 2), r.unsqueeze(1)[:, 0, :, 2:8], 5),
        (leaf(2, 4, 3, 12), leaf(2, 3, 12)),
    ),
    "expand_keys, second derivative": Operator(
        lambda kv, r: torch.autograd.grad(
            sum(each.pow(3).sum() for each in ops.expand_keys(kv, r, 5)), (kv, r), create_graph=True
        ),
        (leaf(2, 3, 4, 12), leaf(2, 3, 6)),
    ),
    "qk_norm_rope, queries": Operator(
        lambda *given: ops.qk_norm_rope(*given)[0], _changed("qk_norm_rope", torch.Tensor.detach, 1, 2, 3).arguments
    ),
    "lora_linears, bias and dropout": Operator(
        _lora_layers, (leaf(6, 16), table(6, 16), leaf(24), leaf(24, 16), *_WIDENED[1:], *_WIDENED, *_WIDENED[1:])
    ),
    "lora_down, 4 bits and dropout": Operator(
        _down_in_4_bits, (leaf(6, 24), leaf(6, 24), table(6, 24), *_NARROWED[1:], *_NESTED)
    ),
    "lora_linear, 4 bits and bias": Operator(
        lambda x, bias, a, b, *parts: ops.lora_linear(x, _in_4_bits(24, 16, *parts), bias, a, b),
        (leaf(6, 16), table(24), *_WIDENED[1:], *_NF4),
    ),
    **{
        f"fp8_linear, {mode}": Operator(
            lambda *given, mode=mode: fp8_linear(*(x.bfloat16() for x in given), mode),
            (leaf(6, 64), leaf(48, 64), leaf(48)),
        )
        for mode in ("rowwise_gw_hp", "tensorwise")
    },
    "fp8_stored_linear": Operator(
        lambda x, *weight: fp8_stored_linear(x.bfloat16(), Fp8Weight(*weight)), (leaf(6, 16), *_on_fp8(32, 16)[:2])
    ),
    "fp8_stored_linear, blocks": Operator(
        lambda x, *weight: fp8_stored_linear(x.bfloat16(), Fp8Weight(*weight)),
        (leaf(6, 256), memory(128, 256, high=0x58), scales(1, 2)),
    ),
    "moe_experts, routing": _changed("moe_experts, no gate", torch.Tensor.detach, 0, 2, 3),
    "moe_experts, biases and two adapters": Operator(
        _adapted_twice,
        (
            *(leaf(6, 16), leaf(6, 2), leaf(3, 24, 16), leaf(3, 16, 12), leaf(3, 24), leaf(3, 16)),
            *(leaf(3, 2, 16), leaf(3, 24, 2), leaf(3, 5, 16), leaf(3, 24, 5)),
            *(leaf(3, 2, 12), leaf(3, 16, 2), leaf(3, 5, 12), leaf(3, 16, 5)),
        ),
    ),
    "cross_entropy, class weights and statistics": Operator(
        lambda *given: ops.cross_entropy(*given[:2], class_weights=given[2], outputs=_STATISTICS).loss,
        (*_LOGITS, table(70)),
    ),
    "cross_entropy, expected, statistics": Operator(
        lambda *given: ops.cross_entropy(*given, outputs=_STATISTICS, expected_grad=0.5).loss, _LOGITS
    ),
    "linear_cross_entropy, bias and statistics": Operator(
        lambda *head: ops.linear_cross_entropy(*head, outputs=_STATISTICS).loss, _BIASED
    ),
    "linear_cross_entropy, none, bias": Operator(partial(ops.linear_cross_entropy, reduction="none"), _BIASED),
    "linear_log_probs of 64, statistics": Operator(
        lambda *head: _pair(ops.linear_log_probs(*head, outputs=LOG_PROBS_OUTPUTS, retain_memory=3 * 256)),
        _LOG_PROBS_OF_64,
    ),
    "linear_log_probs of 64": Operator(ops.linear_log_probs, _LOG_PROBS_OF_64),
    "linear_log_probs of 64, frozen": Operator(ops.linear_log_probs, (leaf(5, 16), table(64, 16), labels(64, 5))),
    "linear_jsd, biases, weights and statistics": Operator(
        lambda *given: (
            ops.linear_jsd(
                *given[:5], 0.5, 1.0, *given[5:7], token_weights=given[7], hard_weight=0.4, outputs=("entropy",)
            ).loss
        ),
        (*_HEADS, leaf(70), table(70), table(5)),
    ),
    "jsd, labels": Operator(ops.jsd, (_LOG_Q, _LOG_P, labels(70, 5))),
    "jsd, labels, none": Operator(partial(ops.jsd, reduction="none"), (_LOG_Q, _LOG_P, labels(70, 5))),
    "jsd, unexpected": Operator(partial(ops.jsd, expected_grad=None), (_LOG_Q, _LOG_P)),
}
"""More of them, where an operator, its fake or its derivative takes another way, for torch's rules of operators."""
