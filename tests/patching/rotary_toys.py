"""Rotary functions of many kinds, and attentions that call them by a global name."""

from __future__ import annotations

import torch
from torch import nn


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_seq_first(q, k, cos, sin, position_ids=None, unsqueeze_dim=2):
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def apply_rotary_in_float(q, k, cos, sin):
    rotated = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float(), -2)
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_interleaved(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + neighbours(q) * sin, k * cos + neighbours(k) * sin


def apply_rotary_repeated(q, k, cos, sin):
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return apply_rotary_interleaved(q, k, cos, sin)


def apply_rotary_split(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = (x[..., : x.shape[-1] // 2].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def rotate(x):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return rotate(q), rotate(k)


def apply_rotary_narrow(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim)


def apply_rotary_swapped_pairs(q, k, cos, sin):
    return apply_rotary_interleaved(q, k, cos.roll(1, -1), sin.roll(1, -1))


def apply_rotary_complex(xq, xk, freqs_cis):
    def rotate(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(-2).type_as(x)

    return rotate(xq), rotate(xk)


def apply_rotary_complex_column(query, key, freqs_ci):
    return apply_rotary_complex(query, key, freqs_ci.reshape(1, query.shape[1], -1))


def apply_rotary_other_way_round(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


def apply_rotary_sections(q, k, cos, sin, sections):
    return apply_rotary_pos_emb(q, k, cos, sin)


def apply_rotary_one(x, cos, sin):
    return apply_rotary_pos_emb(x, x, cos, sin)[0]


def apply_rotary_one_swapped(x, cos, sin):
    return apply_rotary_swapped_pairs(x, x, cos, sin)[0]


def apply_rotary_one_at(x, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim)[0]


def apply_rotary_last_columns(x, cos, sin, unsqueeze_dim=1):
    """As in DeepSeek V4: the last columns of a head turn, in pairs of neighbours."""
    cos, sin = (each.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim) for each in (cos, sin))
    still, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    return torch.cat((still, turned * cos + neighbours(turned) * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, q, k, cos, sin, **kwargs):
        q, k = apply_rotary_pos_emb(q, k, cos, sin, **kwargs)
        return q * self.scale, k


def calling(forward):
    """A module with this forward, which calls a rotary function by its global name."""
    return type("Calling", (nn.Module,), {"forward": forward})


SeqFirst = calling(lambda self, q, k, cos, sin: apply_rotary_seq_first(q, k, cos, sin))
InFloat = calling(lambda self, q, k, cos, sin: apply_rotary_in_float(q, k, cos, sin))
Interleaved = calling(lambda self, q, k, cos, sin: apply_rotary_interleaved(q, k, cos, sin))
Repeated = calling(lambda self, q, k, cos, sin: apply_rotary_repeated(q, k, cos, sin))
Split = calling(lambda self, q, k, cos, sin: apply_rotary_split(q, k, cos, sin))
Narrow = calling(lambda self, q, k, cos, sin: apply_rotary_narrow(q, k, cos, sin))
SwappedPairs = calling(lambda self, q, k, cos, sin: apply_rotary_swapped_pairs(q, k, cos, sin))
Complex = calling(lambda self, q, k, factors: apply_rotary_complex(q, k, factors))
ComplexColumn = calling(lambda self, q, k, factors: apply_rotary_complex_column(q, k, freqs_ci=factors))
OtherWayRound = calling(lambda self, q, k, cos, sin: apply_rotary_other_way_round(q, k, cos, sin))
Sections = calling(lambda self, q, k, cos, sin: apply_rotary_sections(q, k, cos, sin, [1]))
OneByOne = calling(lambda self, q, k, cos, sin: (apply_rotary_one(q, cos, sin), apply_rotary_one(k, cos, sin)))
OneByOneSwapped = calling(lambda self, q, k, cos, sin: apply_rotary_one_swapped(q, cos, sin))
OneByOneAt = calling(
    lambda self, q, k, cos, sin, **at: (apply_rotary_one_at(q, cos, sin, **at), apply_rotary_one_at(k, cos, sin, **at))
)
OneByOneByPlace = calling(lambda self, q, k, cos, sin: apply_rotary_one_at(q, cos, sin, 2))
LastColumns = calling(lambda self, q, k, cos, sin: apply_rotary_last_columns(q, cos, sin, unsqueeze_dim=2))
