"""Small modules of no known family: some with a formula that there is a kernel for, some subtly different."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, size=8, eps=1e-2):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = eps

    def forward(self, states):
        x = states.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(states.dtype)


class NoCasts(Norm):
    """Rounds at every step in bfloat16."""

    def forward(self, states):
        return self.weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps))


class WiderUnderAutocast(Norm):
    """As torch's own normalisations are on CUDA."""

    def forward(self, states):
        normed = super().forward(states)
        return normed.float() if torch.is_autocast_enabled("cpu") else normed


class EpsOutsideTheRoot(Norm):
    def forward(self, states):
        return self.weight * states / (states.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class DetachedScale(Norm):
    """The same values, other gradients."""

    def forward(self, states):
        x = states.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach()).to(states.dtype)


class OptionalGate(Norm):
    def forward(self, states, gate=None):
        normed = super().forward(states)
        return normed if gate is None else normed * gate


class TwoOptions(Norm):
    def forward(self, states, gate=None, residual=None):
        normed = super().forward(states)
        normed = normed if residual is None else normed + residual
        return normed if gate is None else normed * gate


class CenteredNorm(Norm):
    """LayerNorm without a bias, as Cohere's: all of it in fp32, and the result in the dtype of the input."""

    def forward(self, states):
        x = states.float()
        return (self.weight.float() * self.normed(x - x.mean(-1, keepdim=True))).to(states.dtype)

    def normed(self, centred):
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)


class GatedNorm(Norm):
    """RMSNorm times a gate, as in gated delta nets, or of the product, as in Mamba 2; of `groups` in a row."""

    def __init__(self, size=64, eps=1e-5, groups=1, gate_first=False, act=F.silu):
        super().__init__(size, eps)
        self.groups, self.gate_first, self.act = groups, gate_first, act

    def forward(self, states, gate):
        x, factor = states.float(), self.activation(gate.float())
        x = x * factor if self.gate_first else x
        y = self.weight * self.normed(x.unflatten(-1, (self.groups, -1))).flatten(-2).to(states.dtype)
        return y if self.gate_first else (y * factor).to(states.dtype)

    def activation(self, gate):
        return self.act(gate)

    def normed(self, x, eps=None):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if eps is None else eps))


class Raises(Norm):
    def forward(self, states):
        raise RuntimeError("only on a Tuesday")


class MLP(nn.Module):
    def __init__(self, hidden=8, intermediate=12, act=F.silu):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = act

    def forward(self, states):
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class ActOnUp(MLP):
    def forward(self, states):
        return self.down_proj(self.gate_proj(states) * self.act_fn(self.up_proj(states)))


class ClampedGate(MLP):
    """Equal where nothing is clamped."""

    def forward(self, states):
        return self.down_proj(self.act_fn(self.gate_proj(states).clamp(max=0.7)) * self.up_proj(states))


class Toy(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            x = x + child(x)
        return x
