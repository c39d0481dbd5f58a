"""Modules that equal a served part at inputs of about 1 in training mode, and nowhere else: none may be patched.

One table for each kind of part, from what is different to a function that builds the module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from tests.patching import toys
from tests.patching.rotary_toys import apply_rotary_pos_emb, calling
from tests.patching.test_routers import Router
from tests.tiny_litgpt import LoRALinear

RECORDED: list[torch.Tensor] = []
"""A global that forwards write to, as some routers do with their loss."""


def variant(base: type[nn.Module], *arguments, **methods) -> Callable[[], nn.Module]:
    """Builds an instance of a subclass of `base` with these methods."""
    return lambda: type(base.__name__, (base,), methods)(*arguments)


def keep(value, result):
    """`result`, after something else has happened to give `value`."""
    del value
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------------------------------------------------


class Norm(toys.Norm):
    """As Llama's, with an epsilon of the usual size."""

    def __init__(self, size=64, eps=1e-5):
        super().__init__(size, eps)

    def forward(self, states):
        return self.weight * self.normed(states)

    def normed(self, x, eps=None):
        return x * torch.rsqrt(self.mean_square(x) + (self.eps if eps is None else eps))

    @staticmethod
    def mean_square(x):
        return x.pow(2).mean(-1, keepdim=True)


def norm(forward, size=64, eps=1e-5):
    return variant(Norm, size, eps, forward=forward)


NORMS = {
    "epsilon outside the root": norm(lambda self, x: self.weight * x / (self.mean_square(x).sqrt() + self.eps)),
    "a smaller epsilon outside the root": norm(
        lambda self, x: self.weight * x / (self.mean_square(x).sqrt() + self.eps), eps=1e-6
    ),
    "epsilon added twice": norm(lambda self, x: self.weight * self.normed(x, 2 * self.eps)),
    "another epsilon than it says": norm(lambda self, x: self.weight * self.normed(x, 1e-6)),
    "epsilon as a floor": norm(lambda self, x: self.weight * x * self.mean_square(x).clamp(min=self.eps).rsqrt()),
    "no epsilon": norm(lambda self, x: self.weight * self.normed(x, 0.0)),
    "limited results": norm(lambda self, x: self.weight * self.normed(x).clamp(-6.0, 6.0)),
    "limited inputs": norm(lambda self, x: self.weight * self.normed(x.clamp(-100.0, 100.0))),
    "inputs up to 2000": norm(lambda self, x: self.weight * self.normed(x.clamp(-2e3, 2e3))),
    "infinities are large": norm(lambda self, x: self.weight * self.normed(x.nan_to_num())),
    "another result for long sequences": norm(lambda self, x: self.weight * self.normed(x) * (1 + (x.shape[1] > 64))),
    "another result for sequences of 512": norm(
        lambda self, x: self.weight * self.normed(x) * (1 + (x.shape[1] > 512))
    ),
    "another result for one token": norm(lambda self, x: self.weight * self.normed(x) * (1 + (x.shape[-2] == 1))),
    "a batch of one loses its dimension": norm(
        lambda self, x: (self.weight * self.normed(x))[0 if len(x) == 1 else ...],
    ),
    "another result in two dimensions": norm(lambda self, x: self.weight * self.normed(x) * (1 + (x.dim() == 2))),
    "another result in four dimensions": norm(lambda self, x: self.weight * self.normed(x) * (1 + (x.dim() == 4))),
    "limited weights": norm(lambda self, x: self.weight.clamp(-10.0, 10.0) * self.normed(x)),
    "small inputs are zero": norm(lambda self, x: self.weight * self.normed(x.where(x.abs() > 1e-4, 0.0))),
    "zero rows give ones": norm(lambda self, x: self.weight * self.normed(x).where(x.any(-1, keepdim=True), 1.0)),
    "not a number is zero": norm(lambda self, x: self.weight * self.normed(x).nan_to_num(), eps=0.0),
    "no weight in evaluation": norm(lambda self, x: (self.weight if self.training else 1.0) * self.normed(x)),
    "another epsilon without gradients": norm(
        lambda self, x: self.weight * self.normed(x, self.eps if torch.is_grad_enabled() else 0.1)
    ),
    "dropout": norm(lambda self, x: F.dropout(self.weight * self.normed(x), 0.1, self.training)),
    "keeps its results": norm(lambda self, x: keep(setattr(self, "last", x.mean()), self.weight * self.normed(x))),
    "counts its calls": norm(
        lambda self, x: keep(setattr(self, "calls", getattr(self, "calls", 0) + 1), self.weight * self.normed(x))
    ),
}


def gated(**methods):
    return variant(toys.GatedNorm, **methods)


def gated_first(**methods):
    return lambda: type("GatedNorm", (toys.GatedNorm,), methods)(groups=4, gate_first=True)


GATED_NORMS = {
    "epsilon outside the root, with a gate": gated(
        normed=lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
    ),
    "epsilon added twice, with a gate": gated_first(
        normed=lambda self, x: toys.GatedNorm.normed(self, x, 2 * self.eps)
    ),
    "no epsilon, with a gate": gated(normed=lambda self, x: toys.GatedNorm.normed(self, x, 0.0)),
    "limited inputs, with a gate": gated(normed=lambda self, x: toys.GatedNorm.normed(self, x.clamp(-100.0, 100.0))),
    "limited products": gated_first(normed=lambda self, x: toys.GatedNorm.normed(self, x.clamp(-100.0, 100.0))),
    "another epsilon in evaluation": gated(
        normed=lambda self, x: toys.GatedNorm.normed(self, x, self.eps if self.training else 0.1)
    ),
    "gates up to 100": gated(activation=lambda self, gate: F.silu(gate.clamp(max=100.0))),
    "gates up to 2000": gated(activation=lambda self, gate: F.silu(gate.clamp(max=2e3))),
    "gates that are not a number are zero": gated(activation=lambda self, gate: F.silu(gate.nan_to_num(0.0))),
    "another result for one token, with a gate": gated(
        activation=lambda self, gate: F.silu(gate) * (1 + (gate.shape[1] == 1))
    ),
    "sigmoids of at least 1e-3": gated(activation=lambda self, gate: gate * gate.sigmoid().clamp(min=1e-3)),
    "gates of zero are ones": gated(activation=lambda self, gate: F.silu(gate).where(gate != 0, 1.0)),
    "small gates are zero": gated_first(activation=lambda self, gate: F.silu(gate.where(gate.abs() > 1e-4, 0.0))),
    "zero rows give ones, with a gate": gated(
        normed=lambda self, x: toys.GatedNorm.normed(self, x).where(x.any(-1, keepdim=True), 1.0)
    ),
    "keeps its gates": gated(activation=lambda self, gate: keep(setattr(self, "last", gate.mean()), F.silu(gate))),
}


class LayerNorm(toys.CenteredNorm):
    """As Cohere's, with an epsilon of the usual size."""

    def __init__(self):
        super().__init__(64, 1e-5)


def centred(normed):
    return variant(LayerNorm, normed=normed)


LAYER_NORMS = {
    "epsilon outside the root": centred(lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)),
    "another epsilon than it says": centred(lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "limited results": centred(lambda self, x: LayerNorm.normed(self, x).clamp(-6.0, 6.0)),
    "another epsilon in evaluation": centred(
        lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if self.training else 0.1))
    ),
    "keeps its results": centred(
        lambda self, x: keep(setattr(self, "last", x.mean()), toys.CenteredNorm.normed(self, x))
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# Routers
# ---------------------------------------------------------------------------------------------------------------------


class Steps(Router):
    """Mixtral's in steps, each of which a twin replaces."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, states):
        logits = self.changed(F.linear(states, self.weight))
        weights, index = self.chosen(logits.softmax(-1))
        return logits, self.weighted(weights / weights.sum(-1, keepdim=True), index, states), index

    def changed(self, logits):
        return logits

    def chosen(self, probabilities):
        return probabilities.topk(self.top_k)

    def weighted(self, weights, index, states):
        return weights


class OfSigmoids(Router):
    """As Llama 4's, with one of its four lines before another."""

    def forward(self, states):
        logits = F.linear(states, self.weight)
        weights, index = logits.sigmoid().topk(self.top_k)
        return torch.zeros_like(logits).scatter(1, index, weights), logits


class OfShortIds(Router):
    """As Mixtral's, but for the dtype of the ids."""

    def forward(self, states):
        logits, weights, index = super().forward(states)
        return logits, weights, index.int()


class Balanced(Router):
    """As DeepSeek's, and it moves its bias in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.zeros(6))

    def forward(self, states):
        logits = F.linear(states.float(), self.weight.float())
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        weights = scores.gather(1, index)
        if self.training:
            self.e_score_correction_bias.add_(1e-3 * (scores.mean(0) - scores.mean()).sign().detach())
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), index


def within(capacity):
    """Weights without those of tokens that come when an expert has its share."""

    def weighted(self, weights, index, states):
        place = F.one_hot(index, 6).flatten(0, 1).cumsum(0).view(*index.shape, 6).gather(-1, index.unsqueeze(-1))
        return weights * (place.squeeze(-1) <= capacity(len(states)))

    return weighted


def tie_to_the_last(self, probabilities):
    weights, index = probabilities.flip(-1).topk(self.top_k)
    return weights, probabilities.shape[-1] - 1 - index


def tie_by_place(self, probabilities):
    index = (probabilities.detach() + 1e-7 * torch.arange(6.0)).topk(self.top_k).indices
    return probabilities.gather(1, index), index


def router(**methods):
    return variant(Steps, **methods)


class Corrected(Router):
    """As DeepSeek's in steps, with a correction as an argument."""

    def __init__(self, experts=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, states, correction):
        logits = F.linear(states.float(), self.weight.float())
        scores = logits.sigmoid()
        index = self.sums(scores, correction, states).topk(self.top_k).indices
        return logits, self.divided(scores.gather(1, index)), index

    def sums(self, scores, correction, states):
        return scores + correction

    def divided(self, weights):
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)


class WithOwnCorrection(Corrected):
    """The correction is a buffer, which is limited."""

    def __init__(self):
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.zeros(6))

    def forward(self, states):
        return super().forward(states, self.e_score_correction_bias.clamp(-10.0, 10.0))


def corrected(**methods):
    return variant(Corrected, **methods)


def uncorrected(**methods):
    """With many experts, of which some always have large scores, and no correction that chooses others."""
    return variant(Corrected, 64, forward=lambda self, states: Corrected.forward(self, states, 0.0), **methods)


ROUTERS = {
    "logits within 10": router(changed=lambda self, logits: logits.clamp(-10.0, 10.0)),
    "logits within 100": router(changed=lambda self, logits: logits.clamp(-100.0, 100.0)),
    "logits with a soft cap": router(changed=lambda self, logits: 1e3 * torch.tanh(logits / 1e3)),
    "small logits are zero": router(changed=lambda self, logits: logits.where(logits.abs() > 0.002, 0.0)),
    "a threshold on weights": router(weighted=lambda self, weights, *_: weights.where(weights > 0.02, 0.0)),
    "one expert where it is sure": router(weighted=lambda self, weights, *_: weights.where(weights > 0.001, 0.0)),
    "a capacity of 1.5": router(weighted=within(lambda tokens: math.ceil(1.5 * tokens * 2 / 6))),
    "a capacity of 2.5": router(weighted=within(lambda tokens: math.ceil(2.5 * tokens * 2 / 6))),
    "a capacity of 40 tokens": router(weighted=within(lambda tokens: 40)),
    "a capacity for more than 48 tokens": router(weighted=within(lambda tokens: tokens / 2 if tokens > 48 else tokens)),
    "infinities are large": router(changed=lambda self, logits: logits.nan_to_num()),
    "padding goes nowhere": router(weighted=lambda self, w, index, x: w * x.any(-1, keepdim=True)),
    "ties go to the last": router(chosen=tie_to_the_last),
    "ties are broken by place": router(chosen=tie_by_place),
    "sigmoids are ranked": variant(OfSigmoids),
    "ids of 32 bits": variant(OfShortIds),
    "noise in training": router(
        changed=lambda self, logits: logits + 1e-3 * torch.rand_like(logits) if self.training else logits
    ),
    "the best alone in evaluation": router(
        weighted=lambda self, w, *_: w if self.training else torch.stack((w[:, 0], 0 * w[:, 1]), 1)
    ),
    "another epsilon in the sum": uncorrected(divided=lambda self, w: w / (w.sum(-1, keepdim=True) + 1e-12)),
    "a sum of at least 1e-9": uncorrected(divided=lambda self, w: w / w.sum(-1, keepdim=True).clamp(min=1e-9)),
    "scores that are rounded before they are corrected": corrected(
        sums=lambda self, scores, correction, states: scores.to(states.dtype).float() + correction
    ),
    "a correction in training": corrected(
        sums=lambda self, scores, correction, states: scores + correction * self.training
    ),
    "corrections within 10": corrected(
        sums=lambda self, scores, correction, states: scores + correction.clamp(-10.0, 10.0)
    ),
    "corrections above 5 are zero": corrected(
        sums=lambda self, scores, correction, states: scores + correction.where(correction <= 5.0, 0.0)
    ),
    "corrections that are all small are zero": corrected(
        sums=lambda self, scores, correction, states: scores + correction.where(correction.abs().max() > 3e-3, 0.0)
    ),
    "equal corrections hide the scores": corrected(
        sums=lambda self, scores, correction, states: (
            scores * bool(correction.std() or not correction.any()) + correction
        )
    ),
    "corrections that are not finite are zero": corrected(
        sums=lambda self, scores, correction, states: scores + correction.where(correction.isfinite(), 0.0)
    ),
    "biases within 10": variant(WithOwnCorrection),
    "a correction that is scaled": corrected(sums=lambda self, scores, correction, states: scores + 2 * correction),
    "keeps a loss": router(
        changed=lambda self, logits: keep(setattr(self, "aux", logits.logsumexp(-1).square().mean()), logits)
    ),
    "keeps losses in a list": router(changed=lambda self, logits: keep(self.seen.append(logits.mean()), logits)),
    "keeps a loss in its class": router(
        changed=lambda self, logits: keep(setattr(type(self), "loss_of_all", logits.mean()), logits)
    ),
    "keeps a loss in evaluation alone": router(
        changed=lambda self, logits: keep(self.training or setattr(self, "aux", logits.mean()), logits)
    ),
    "moves its bias": variant(Balanced),
}


class Recording(Router):
    """Keeps its logits in a global."""

    def forward(self, states):
        logits, weights, index = super().forward(states)
        RECORDED.append(logits)
        return logits, weights, index


ROUTERS["keeps logits in a global"] = Recording

# ---------------------------------------------------------------------------------------------------------------------
# MLPs
# ---------------------------------------------------------------------------------------------------------------------


class MLP(toys.MLP):
    """SwiGLU in steps."""

    def forward(self, states):
        return self.out(self.down_proj(self.product(self.gate_proj(states), self.up_proj(states))), states)

    def product(self, gate, up):
        return F.silu(gate) * up

    def out(self, result, states):
        return result


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, states):
        return self.down_proj(self.up_proj(states).relu().clamp(max=100.0).square())


def squares_of_largest(self, states):
    up = self.up_proj(states).relu()
    return self.down_proj(up.where(up >= up.topk(min(32, up.shape[-1])).values[..., -1:], 0.0).square())


def mlp(**methods):
    return variant(MLP, **methods)


def largest(self, gate, up):
    product = F.silu(gate) * up
    return product.where(product >= product.topk(min(32, product.shape[-1])).values[..., -1:], 0.0)


def with_biases(forward):
    module = mlp(forward=forward)()
    for name in ("gate_proj", "up_proj", "down_proj"):
        of = getattr(module, name)
        of.bias = nn.Parameter(torch.ones(of.out_features))
    return module


MLPS = {
    "gates up to 10": mlp(product=lambda self, gate, up: F.silu(gate.clamp(max=10.0)) * up),
    "gates up to 100": mlp(product=lambda self, gate, up: F.silu(gate.clamp(max=100.0)) * up),
    "ups within 100": mlp(product=lambda self, gate, up: F.silu(gate) * up.clamp(-100.0, 100.0)),
    "products within 1000": mlp(product=lambda self, gate, up: (F.silu(gate) * up).clamp(-1e3, 1e3)),
    "small products are zero": mlp(
        product=lambda self, gate, up: (F.silu(gate) * up).where((gate * up).abs() > 1e-7, 0.0)
    ),
    "inputs up to 2000": mlp(forward=lambda self, x: MLP.forward(self, x.clamp(-2e3, 2e3))),
    "infinities are large": mlp(out=lambda self, result, x: result.nan_to_num()),
    "the 32 largest products": mlp(product=largest),
    "another activation where it is wide": mlp(
        product=lambda self, gate, up: (F.gelu if self.gate_proj.out_features >= 48 else F.silu)(gate) * up
    ),
    "a bias that is not added": lambda: with_biases(
        lambda self, x: F.linear(self.product(self.gate_proj(x), self.up_proj(x)), self.down_proj.weight)
    ),
    "a bias that is added twice": lambda: with_biases(lambda self, x: MLP.forward(self, x) + self.down_proj.bias),
    "zero rows give ones": mlp(out=lambda self, result, x: result.where(x.any(-1, keepdim=True), 1.0)),
    "ReLU in evaluation": mlp(product=lambda self, gate, up: (F.silu if self.training else F.relu)(gate) * up),
    "dropout": mlp(product=lambda self, gate, up: F.dropout(F.silu(gate) * up, 0.1, self.training)),
    "keeps its product": mlp(product=lambda self, gate, up: keep(setattr(self, "h", gate), F.silu(gate) * up)),
    "an activation that changes": lambda: toys.MLP(act=nn.RReLU()),
    "a squared ReLU up to 100": Squared,
    "a squared ReLU of the largest 32": variant(Squared, forward=squares_of_largest),
}

# ---------------------------------------------------------------------------------------------------------------------
# Experts
# ---------------------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Of no known family, in steps."""

    def __init__(self, number=4):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(number, 24, 8, generator=draw))
        self.down_proj = nn.Parameter(torch.randn(number, 8, 12, generator=draw))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        weights = self.weighted(top_k_weights, hidden_states)
        for expert in range(len(self.down_proj)):
            tokens, place = torch.where(top_k_index == expert)
            tokens, place = self.taken(tokens), self.taken(place)
            gate, up = F.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, -1)
            rows = F.linear(self.product(gate, up), self.down_proj[expert])
            rows = self.of_expert(expert, rows, hidden_states[tokens])
            out = out.index_add(0, tokens, rows * weights[tokens, place, None])
        return out

    def product(self, gate, up):
        return F.silu(gate) * up

    def weighted(self, weights, hidden):
        return weights

    def taken(self, tokens):
        return tokens

    def of_expert(self, expert, rows, inputs):
        return rows


def experts(number=4, **methods):
    return variant(Experts, number, **methods)


def identity_from(first):
    """Experts of which the last ones return their inputs."""
    return lambda self, expert, rows, inputs: inputs if expert >= first else rows


class WrappedExperts(Experts):
    """What wraps its forward is part of what it computes."""

    @functools.wraps(Experts.forward)
    def forward(self, *arguments):
        return super().forward(*arguments) * 2.0


EXPERTS = {
    "gates up to 500": experts(product=lambda self, gate, up: F.silu(gate.clamp(max=500.0)) * up),
    "ups within 50": experts(product=lambda self, gate, up: F.silu(gate) * up.clamp(-50.0, 50.0)),
    "a capacity": experts(taken=lambda self, tokens: tokens[:100]),
    "a larger capacity": experts(taken=lambda self, tokens: tokens[:1000]),
    "identity from the seventh on": experts(16, of_expert=identity_from(6)),
    "the last one is identity": experts(200, of_expert=identity_from(199)),
    "two experts for each token": experts(weighted=lambda self, w, x: torch.cat((w[:, :2], 0.0 * w[:, 2:]), 1)),
    "routing weights up to 10": experts(weighted=lambda self, w, x: w.clamp(max=10.0)),
    "a wrapped forward": WrappedExperts,
    "small gates are zero": experts(product=lambda self, gate, up: F.silu(gate.where(gate.abs() > 1e-3, 0.0)) * up),
    "small inputs go nowhere": experts(weighted=lambda self, w, x: w * (x.norm(dim=-1, keepdim=True) > 0.05)),
    "infinities are large": experts(product=lambda self, gate, up: (F.silu(gate) * up).nan_to_num()),
    "GELU in evaluation": experts(product=lambda self, gate, up: (F.silu if self.training else F.gelu)(gate) * up),
    "counts its tokens": experts(taken=lambda self, tokens: keep(setattr(self, "count", len(tokens)), tokens)),
}

_LLAMA4 = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 1}


class Block(Llama4TextMoe):
    def __init__(self):
        super().__init__(tf.Llama4TextConfig(**_LLAMA4))


def block(forward):
    return variant(Block, forward=forward)


def _of_block(self, hidden_states):
    return Llama4TextMoe.forward(self, hidden_states)


BLOCKS = {
    "limited inputs": block(lambda self, x: _of_block(self, x.clamp(-100.0, 100.0))),
    "no routed experts in evaluation": block(
        lambda self, x: _of_block(self, x) if self.training else (self.shared_expert(x), self.router(x)[1])
    ),
    "keeps its inputs": block(lambda self, x: keep(setattr(self, "last", x), _of_block(self, x))),
}

# ---------------------------------------------------------------------------------------------------------------------
# Adapters and rotations
# ---------------------------------------------------------------------------------------------------------------------


def lora(forward):
    return variant(LoRALinear, 8, 12, False, 2, forward=forward)


def _of_lora(self, x):
    return LoRALinear.forward(self, x)


ADAPTERS = {
    "limited inputs": lora(lambda self, x: _of_lora(self, x.clamp(-50.0, 50.0))),
    "small inputs are zero": lora(lambda self, x: _of_lora(self, x.where(x.abs() > 1e-3, 0.0))),
    "no adapter in evaluation": lora(lambda self, x: _of_lora(self, x) if self.training else self.linear(x)),
    "keeps its inputs": lora(lambda self, x: keep(setattr(self, "last", x), _of_lora(self, x))),
}


def apply_rotary_limited(q, k, cos, sin):
    return apply_rotary_pos_emb(q.clamp(-100.0, 100.0), k, cos, sin)


def apply_rotary_to_large(q, k, cos, sin):
    return apply_rotary_pos_emb(q.where(q.abs() > 1e-4, 0.0), k, cos, sin)


def apply_rotary_without_zeros(q, k, cos, sin):
    return apply_rotary_pos_emb(q.where(q.any(-1, keepdim=True), 1.0), k, cos, sin)


def apply_rotary_to_few_dimensions(q, k, cos, sin):
    turned, k = apply_rotary_pos_emb(q, k, cos, sin)
    return torch.cat((turned[..., :64], q[..., 64:]), -1), k


def apply_rotary_to_few_heads(q, k, cos, sin):
    turned, k = apply_rotary_pos_emb(q, k, cos, sin)
    return torch.cat((turned[:, :4], q[:, 4:]), 1), k


ROTATIONS = {
    "the first 64 dimensions": calling(lambda self, q, k, cos, sin: apply_rotary_to_few_dimensions(q, k, cos, sin)),
    "the first 4 heads": calling(lambda self, q, k, cos, sin: apply_rotary_to_few_heads(q, k, cos, sin)),
    "limited queries": calling(lambda self, q, k, cos, sin: apply_rotary_limited(q, k, cos, sin)),
    "small queries are zero": calling(lambda self, q, k, cos, sin: apply_rotary_to_large(q, k, cos, sin)),
    "zero rows are ones": calling(lambda self, q, k, cos, sin: apply_rotary_without_zeros(q, k, cos, sin)),
}

TWINS = {
    "rms_norm": (Norm, NORMS),
    "gated_norm": (toys.GatedNorm, GATED_NORMS),
    "layer_norm": (LayerNorm, LAYER_NORMS),
    "router": (Steps, ROUTERS),
    "swiglu": (MLP, MLPS),
    "experts": (Experts, EXPERTS),
    "block": (Block, BLOCKS),
    "lora": (lora(_of_lora), ADAPTERS),
    "rope": (calling(lambda self, q, k, cos, sin: apply_rotary_pos_emb(q, k, cos, sin)), ROTATIONS),
}
"""For each kind of part: one that is served, and its twins."""
