"""Norms, attention, embedding and rotary functions under Liger's names: each is its function, with its own parameters.

What the functions compute is proved in `tests/kernels`.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers.models.llama4 import modeling_llama4

from liger_trainer import functional, nn
from tests.kernels.rope.test_rope import original


def trained(module):
    """`module` with random parameters."""
    for parameter in module.parameters():
        parameter.data.normal_()
    return module


@pytest.mark.parametrize("casting", ["llama", "gemma", "olmo2", "none"])
def test_rms_norms(casting):
    options = {"eps": 1e-5, "offset": 1.0, "casting_mode": casting, "init_fn": "zeros", "in_place": False}
    assert not nn.LigerRMSNorm(8, **options).weight.any()
    x, residual = torch.randn(2, 3, 8)
    scale, shift = torch.randn(2, 3, 8)
    norm = trained(nn.LigerRMSNorm(8, **options, row_mode=True))
    assert torch.equal(norm(x), functional.rms_norm(x, norm.weight, 1e-5, 1.0, casting))
    assert repr(norm) == f"LigerRMSNorm(8, eps=1e-05, offset=1.0, casting={casting})"
    norm = trained(nn.LigerFusedAddRMSNorm(8, **options))
    expected = functional.fused_add_rms_norm(x, residual, norm.weight, 1e-5, 1.0, casting)
    assert all(map(torch.equal, norm(x, residual), expected))
    norm = trained(nn.LigerModulatedRMSNorm(8, **options))
    for given in ((scale,), (scale, shift)):
        expected = functional.modulated_rms_norm(x, norm.weight, *given, eps=1e-5, offset=1.0, casting=casting)
        assert torch.equal(norm(x, *given), expected)


def test_norms_without_a_weight():
    x, scale = torch.randn(2, 3, 8)
    expected = functional.rms_norm(x, None)
    for norm in (
        nn.LigerRMSNorm(8, elementwise_affine=False),
        nn.LigerRMSNormForGemma4(8, with_scale=False),
        nn.LigerRMSNormForMuseGlimmer(8, with_scale=False),
        nn.LigerRMSNormForMuseGlimmer(with_scale=False),
    ):
        assert norm.weight is None
        assert not norm.state_dict()
        assert torch.equal(norm(x), expected)
    norm = nn.LigerModulatedRMSNorm(8, elementwise_affine=False)
    assert not norm.state_dict()
    assert torch.equal(norm(x, scale), functional.modulated_rms_norm(x, None, scale))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("LigerRMSNormForGemma", "gemma.GemmaRMSNorm"),
        ("LigerRMSNormForGemma2", "gemma2.Gemma2RMSNorm"),
        ("LigerRMSNormForGemma3", "gemma3.Gemma3RMSNorm"),
        ("LigerRMSNormForGemma4", "gemma4.Gemma4RMSNorm"),
        ("LigerRMSNormForQwen3Next", "qwen3_next.Qwen3NextRMSNorm"),
        ("LigerRMSNormForOlmo2", "olmo2.Olmo2RMSNorm"),
        ("LigerRMSNormForGlm4", "glm4.Glm4RMSNorm"),
    ],
)
def test_families_have_the_values_of_transformers(name, family):
    package, class_name = family.split(".")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    theirs, ours = getattr(module, class_name)(8, eps=1e-6), getattr(nn, name)(8)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())  # initial weights too
    ours.load_state_dict(trained(theirs).state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_other_norms():
    x = torch.randn(2, 6, 8)
    norm = nn.LigerLayerNorm(8, eps=1e-5, bias=True, impl="triton")
    assert norm.bias.any()
    assert not nn.LigerLayerNorm(8).bias.any()
    assert torch.equal(norm(x), functional.layer_norm(x, norm.weight, norm.bias, 1e-5))
    norm = nn.LigerGroupNorm(6, 3, eps=1e-5, bias=True)
    assert norm.bias.any()
    assert not nn.LigerGroupNorm(6, 3).bias.any()
    assert not nn.LigerGroupNorm(6, 3, init_fn="zeros").weight.any()
    assert torch.equal(norm(x), functional.group_norm(x, 3, norm.weight, norm.bias, 1e-5))
    assert repr(norm) == "LigerGroupNorm(6, num_groups=3, eps=1e-05)"
    norm = nn.LigerPolyNorm(eps=1e-5)
    assert [*norm.weight.tolist(), norm.bias.item()] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert torch.equal(norm(x), functional.poly_norm(x, norm.weight, norm.bias, 1e-5))
    for beta in (True, False):
        layer = nn.LigerDyT(8, beta=beta, init_alpha=0.25)
        assert repr(layer) == f"LigerDyT(8, init_alpha=0.25, beta={beta})"
        assert {name: set(value.tolist()) for name, value in layer.state_dict().items()} == {
            **{"alpha": {0.25}, "gamma": {1.0}},
            **({"beta": {0.0}} if beta else {}),
        }
        trained(layer)
        assert torch.equal(layer(x), functional.dyt(x, layer.alpha, layer.gamma, layer.beta))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LigerRMSNorm(8, init_fn="randn"), "`init_fn` is 'randn'"),
        (lambda: nn.LigerRMSNorm(8, casting_mode="bf16"), "`casting_mode` is 'bf16'"),
        (lambda: nn.LigerRMSNormForMuseGlimmer(), r"`dim`.*with_scale"),
        (lambda: nn.LigerLayerNorm(8, init_fn="randn"), "`init_fn`"),
        (lambda: nn.LigerGroupNorm(6, 4), "`num_groups` is 4, which does not divide `num_channels`, 6"),
        (lambda: nn.LigerMultiTokenAttention(4, 6, 3, groups=3), "`groups` is 3"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_softmax_and_sparsemax():
    x = torch.randn(3, 5, 4)
    assert torch.equal(nn.LigerSoftmax()(x), functional.softmax(x))
    assert torch.equal(nn.LigerSparsemax(dim=1)(x), functional.sparsemax(x, dim=1))
    assert "dim=1" in repr(nn.LigerSparsemax(dim=1))


@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention(sparse):
    module = nn.LigerMultiTokenAttention(4, 6, (3, 5), padding=(1, 2), groups=2, sparse=sparse)
    assert module.weight.shape == (6, 2, 3, 5)
    assert not module.bias.any()
    module.bias.data.normal_()
    scores, options = torch.randn(2, 4, 9, 9), {"padding": (1, 2), "groups": 2, "sparse": sparse}
    assert torch.equal(module(scores), functional.multi_token_attention(scores, module.weight, module.bias, **options))
    assert nn.LigerMultiTokenAttention(1, 1, 1, bias=False).bias is None
    assert f"sparse={sparse}" in repr(module)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding(padding_idx):
    table, ids = nn.LigerEmbedding(5, 4, padding_idx), torch.tensor([[0, 2, 2], [1, 0, 4]])
    theirs = torch.nn.Embedding(5, 4, padding_idx, _weight=table.weight.detach().clone())
    if padding_idx is not None:
        assert not table.weight[padding_idx].any()
    for module in (table, theirs):
        module(ids).square().sum().backward()
    torch.testing.assert_close(table.weight.grad, theirs.weight.grad)
    assert repr(table).startswith("LigerEmbedding(5, 4")


def rows(seq_first=False):
    """q and k of four and two heads, (batch, heads, seq, head_dim)."""
    q, k = (torch.randn(2, 5, heads, 8) for heads in (4, 2))
    return (q, k) if seq_first else (q.transpose(1, 2), k.transpose(1, 2))


def test_rotary():
    q, k = rows()
    cos, sin = torch.randn(2, 1, 5, 4)
    tables = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    full = functional.rope(q, k, *tables)
    for got in (
        nn.liger_rotary_pos_emb(q, k, *tables, torch.arange(5)),
        nn.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=8),
        nn.liger_rotary_pos_emb(q, k, cos[0], sin[0], rotary_dim=8),
    ):
        torch.testing.assert_close(got, full)
    partial = nn.liger_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(partial[0][..., 4:], q[..., 4:])
    swapped = nn.liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(swapped[0].transpose(1, 2), partial[0])
    with pytest.raises(ValueError, match="`rotary_dim` is 6"):
        nn.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=6)


def test_rotary_functions_of_model_families():
    q, k = rows()
    cos, sin = torch.randn(2, 3, 2, 5, 8)
    factors = torch.complex(*torch.randn(2, 1, 5, 4))
    by_token, packed = (q.transpose(1, 2), k.transpose(1, 2)), (q[0].transpose(0, 1), k[0].transpose(0, 1))
    axes = (q, k, cos, sin, [1, 1, 2])
    half, plane = (cos[0, ..., :4], sin[0, ..., :4]), (cos[0, 0], sin[0, 0])
    for ours, expected in (
        (nn.liger_rotary_pos_emb_gpt_oss(q, k, *half), functional.rope(q, k, *half, rotary_dim=8)),
        (nn.liger_rotary_pos_emb_vision(*packed, *plane), functional.rope_vision(*packed, *plane)),
        (nn.liger_multimodal_rotary_pos_emb(*axes), functional.rope_multimodal(*axes)),
        (nn.liger_llama4_text_rotary_pos_emb(*by_token, factors), functional.rope_complex(*by_token, factors)),
    ):
        assert all(map(torch.equal, ours, expected))


def test_rotary_function_of_llama4s_vision_tower():
    q, k = rows(seq_first=True)
    factors = torch.complex(*torch.randn(2, 1, 5, 4))
    expected = functional.rope_complex(q, k, factors)
    for table in (factors[0], factors[0][:, None], factors[:, :, None]):
        torch.testing.assert_close(nn.liger_llama4_vision_rotary_pos_emb(q, k, table), expected)
    cast = factors[0][:, None].real.bfloat16()  # what casting the model leaves of the buffer
    expected = original(modeling_llama4, "vision_apply_rotary_emb")(q, k, cast)
    torch.testing.assert_close(nn.liger_llama4_vision_rotary_pos_emb(q, k, cast), expected)
