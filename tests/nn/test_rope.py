"""The rotary functions under Liger's names: signatures, and the models' own functions."""

import inspect

import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen3_vl import modeling_qwen3_vl

from liger_trainer import functional, nn

SIGNATURES = {
    "liger_rotary_pos_emb_gpt_oss": ["q", "k", "cos", "sin"],
    "liger_rotary_pos_emb_vision": ["q", "k", "cos", "sin"],
    "liger_multimodal_rotary_pos_emb": ["q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim"],
    "liger_llama4_text_rotary_pos_emb": ["xq", "xk", "freqs_cis"],
    "liger_llama4_vision_rotary_pos_emb": ["query", "key", "freqs_ci"],
}


def rows(seq_first=False):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, heads, 8, generator=generator) for heads in (4, 2))
    return (q, k) if seq_first else (q.transpose(1, 2), k.transpose(1, 2))


def tables(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def original(module, name):
    function = getattr(module, name)
    return getattr(function, "forward", function)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_ligers(name):
    assert list(inspect.signature(getattr(nn, name)).parameters) == SIGNATURES[name]


def test_gpt_oss():
    arguments = (*rows(), *tables(1, 5, 4))
    expected = original(modeling_gpt_oss, "apply_rotary_pos_emb")(*arguments)
    torch.testing.assert_close(nn.liger_rotary_pos_emb_gpt_oss(*arguments), expected)


def test_vision():
    q, k = rows(seq_first=True)
    arguments = (q[0].bfloat16(), k[0].bfloat16(), *tables(5, 8))
    expected = original(modeling_qwen3_vl, "apply_rotary_pos_emb_vision")(*arguments)
    torch.testing.assert_close(nn.liger_rotary_pos_emb_vision(*arguments), expected)


def test_multimodal():
    arguments = (*rows(), *tables(3, 2, 5, 8), [1, 1, 2])
    torch.testing.assert_close(nn.liger_multimodal_rotary_pos_emb(*arguments), functional.rope_multimodal(*arguments))
    one_axis = (*arguments[:2], *(table[1] for table in arguments[2:4]))
    got = nn.liger_multimodal_rotary_pos_emb(*arguments[:4], [0, 4, 0])
    torch.testing.assert_close(got, functional.rope(*one_axis))


def test_llama4():
    q, k = rows(seq_first=True)
    factors = torch.complex(*tables(1, 5, 4))
    expected = original(modeling_llama4, "apply_rotary_emb")(q, k, factors)
    torch.testing.assert_close(nn.liger_llama4_text_rotary_pos_emb(q, k, factors), expected)
    for table in (factors[0], factors[0][:, None], factors[:, :, None]):
        torch.testing.assert_close(nn.liger_llama4_vision_rotary_pos_emb(q, k, table), expected)
    cast = factors[0][:, None].real.bfloat16()  # what casting the model leaves of the buffer
    expected = original(modeling_llama4, "vision_apply_rotary_emb")(q, k, cast)
    torch.testing.assert_close(nn.liger_llama4_vision_rotary_pos_emb(q, k, cast), expected)
