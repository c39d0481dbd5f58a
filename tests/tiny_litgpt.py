"""A model with the structure of LitGPT 0.5.13: the names, shapes and calls of `litgpt.model`, `.lora` and `.utils`.

`tests/patching/test_litgpt.py` runs its tests with this, and with LitGPT itself where that is installed.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass
class Config:
    block_size: int = 32
    padded_vocab_size: int = 104
    n_layer: int = 2
    n_head: int = 4
    n_query_groups: int = 2
    n_embd: int = 32
    head_size: int = 8
    intermediate_size: int = 48
    rotary_percentage: float = 1.0
    rope_interleave: bool = False
    norm_class_name: str = "RMSNorm"
    mlp_class_name: str = "LLaMAMLP"
    norm_eps: float = 1e-5
    norm_qk: bool = False
    bias: bool = False
    lm_head_bias: bool = False
    parallel_residual: bool = False
    gelu_approximate: str = "none"
    final_logit_softcapping: float | None = None
    lora_r: int = 0
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    lora_query: bool = False
    lora_key: bool = False
    lora_value: bool = False
    lora_projection: bool = False
    lora_mlp: bool = False
    lora_head: bool = False

    @property
    def rope_n_elem(self) -> int:
        return int(self.rotary_percentage * self.head_size)


class GPT(nn.Module):
    def __init__(self, config: Config, linear: type = nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.lm_head = linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.transformer = nn.ModuleDict({"wte": embedding, "h": blocks, "ln_f": norm(config, config.n_embd)})
        angles = torch.outer(torch.arange(32.0), 1e4 ** -(torch.arange(0, config.rope_n_elem, 2) / config.rope_n_elem))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, idx, input_pos=None, input_pos_maxp1=None, lm_head_chunk_size=0):
        length = idx.size(1)
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, self.cos[:length].unsqueeze(0), self.sin[:length].unsqueeze(0))
        x = self.transformer.ln_f(x)
        cap = self.config.final_logit_softcapping
        clamp = nn.Identity() if cap is None else lambda logits: torch.tanh(logits / cap) * cap
        if lm_head_chunk_size > 0:
            return [clamp(self.lm_head(part)) for part in x.split(lm_head_chunk_size, dim=1)]
        return clamp(self.lm_head(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(config, config.n_embd), norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = {"LLaMAMLP": LLaMAMLP, "GemmaMLP": GemmaMLP, "GptNeoxMLP": GptNeoxMLP}[config.mlp_class_name](config)
        self.config = config

    def forward(self, x, cos, sin, mask=None, input_pos=None, input_pos_maxp1=None):
        attended = self.attn(self.norm_1(x), cos, sin, mask, input_pos, input_pos_maxp1)
        if self.config.parallel_residual:
            return self.mlp(self.norm_2(x)) + attended + x
        x = attended + x
        return self.mlp(self.norm_2(x)) + x


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        heads = config.n_head + 2 * config.n_query_groups
        self.qkv = LoRAQKVLinear(config, heads * config.head_size)
        rank = config.lora_r if config.lora_projection else 0
        self.proj = LoRALinear(config.n_head * config.head_size, config.n_embd, config.bias, rank, config.lora_dropout)
        self.norm_q = norm(config, config.head_size) if config.norm_qk else None
        self.norm_k = norm(config, config.head_size) if config.norm_qk else None
        self.config = config

    def forward(self, x, cos, sin, mask=None, input_pos=None, input_pos_maxp1=None):
        config, (batch, length, _) = self.config, x.size()
        groups = (config.n_head, config.n_query_groups, config.n_query_groups)
        heads = self.qkv(x).split([number * config.head_size for number in groups], dim=-1)
        q, k, v = (each.view(batch, length, -1, config.head_size).transpose(1, 2) for each in heads)
        if config.norm_qk:
            q, k = self.norm_q(q), self.norm_k(k)
        rotated = config.rope_n_elem
        if config.rope_interleave:
            q_roped = apply_rope_interleave(q[..., :rotated], cos, sin)
            k_roped = apply_rope_interleave(k[..., :rotated], cos, sin)
        else:
            q_roped = apply_rope(q[..., :rotated], cos, sin)
            k_roped = apply_rope(k[..., :rotated], cos, sin)
        q, k = torch.cat((q_roped, q[..., rotated:]), -1), torch.cat((k_roped, k[..., rotated:]), -1)
        k, v = (each.repeat_interleave(config.n_head // config.n_query_groups, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


class LLaMAMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        adapter = {"r": config.lora_r, "dropout": config.lora_dropout}
        linear = partial(LoRALinear, **adapter) if config.lora_mlp else nn.Linear
        self.fc_1 = linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.fc_2 = linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = linear(config.intermediate_size, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x):
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class GemmaMLP(LLaMAMLP):
    def forward(self, x):
        return self.proj(F.gelu(self.fc_1(x), approximate=self.config.gelu_approximate) * self.fc_2(x))


class GptNeoxMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x), approximate=self.config.gelu_approximate))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.dim, self.add_unit_offset = eps, -1, False

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(self.dim, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class LoRALinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, r: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.r, self.lora_alpha, self.merged = r, 16, False
        self.lora_dropout = nn.Dropout(dropout) if dropout else lambda x: x
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        if r:
            self.lora_A = nn.Parameter(torch.randn(r, in_features) / 4)
            self.lora_B = nn.Parameter(torch.zeros(out_features, r))
            self.scaling = self.lora_alpha / r

    def forward(self, x):
        pretrained = self.linear(x)
        if self.r == 0 or self.merged:
            return pretrained
        return pretrained + self.lora_dropout(x) @ self.lora_A.mT @ self.lora_B.mT * self.scaling


class LoRAQKVLinear(LoRALinear):
    def __init__(self, config: Config, out_features: int) -> None:
        super().__init__(config.n_embd, out_features, config.bias, 0, config.lora_dropout)
        self.head_size, self.n_head, self.n_query_groups = config.head_size, config.n_head, config.n_query_groups
        self.enable_lora = (config.lora_query, config.lora_key, config.lora_value)
        if config.lora_r and any(self.enable_lora):
            sizes = [self.head_size * n for n in (self.n_head, self.n_query_groups, self.n_query_groups)]
            self.qkv_shapes = [size for size, has in zip(sizes, self.enable_lora) if has]
            self.r, self.scaling = config.lora_r, self.lora_alpha / config.lora_r
            self.lora_A = nn.Parameter(torch.randn(self.r * len(self.qkv_shapes), config.n_embd) / 4)
            self.lora_B = nn.Parameter(torch.zeros(sum(self.qkv_shapes), self.r))

    def forward(self, x):
        pretrained = self.linear(x)
        if self.r == 0 or self.merged:
            return pretrained
        adapted = zip(F.linear(self.lora_dropout(x), self.lora_A).split(self.r, -1), self.lora_B.split(self.qkv_shapes))
        sizes = [self.head_size * n for n in (self.n_head, self.n_query_groups, self.n_query_groups)]
        parts = [
            F.linear(*next(adapted)) if has else x.new_zeros(*x.shape[:-1], n)
            for n, has in zip(sizes, self.enable_lora)
        ]
        return pretrained + torch.cat(parts, -1) * self.scaling


def lora_gpt(config: Config) -> GPT:
    return GPT(config, partial(LoRALinear, r=config.lora_r if config.lora_head else 0))


def norm(config: Config, size: int) -> nn.Module:
    kind = RMSNorm if config.norm_class_name == "RMSNorm" else nn.LayerNorm
    return kind(size, eps=config.norm_eps)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if cos.dim() != 3:
        raise ValueError(f"cos has shape {cos.shape}")
    first, second = x.chunk(2, dim=-1)
    cos, sin = (table.view(len(table), *[1] * (x.dim() - 3), *table.shape[1:]) for table in (cos, sin))
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def apply_rope_interleave(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return apply_rope(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def chunked_cross_entropy(logits, targets, chunk_size=128, ignore_index=-100):
    flat = partial(F.cross_entropy, ignore_index=ignore_index)
    if isinstance(logits, list):
        if chunk_size == 0:
            logits = torch.cat(logits, dim=1)
            return flat(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
        parts = [part.reshape(-1, part.size(-1)) for part in logits]
        labels = [part.reshape(-1) for part in targets.split(logits[0].size(1), dim=1)]
    else:
        logits, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
        if chunk_size == 0:
            return flat(logits, targets)
        parts, labels = logits.split(chunk_size), targets.split(chunk_size)
    losses = [flat(part, label, reduction="none") for part, label in zip(parts, labels)]
    count = (targets != ignore_index).sum()
    return torch.cat(losses).sum() / count.maximum(torch.ones_like(count))
