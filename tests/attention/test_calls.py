"""Attentions whose calls our attention would not compute: each is left alone, with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from liger_trainer import apply_liger_kernel
from liger_trainer.attention import interface
from liger_trainer.attention.interface import PROVED, attention_forward
from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.patching.attention import find_attention
from liger_trainer.patching.probe import Probe
from tests.attention.families import build, full
from tests.attention.test_families import ONLY, attention_rows, eager, implementation
from tests.patching.comparisons import assert_same, loss_and_gradients


class _Attention(LlamaAttention):
    """Llama's, in parts that the classes below change."""

    def operands(self, hidden, tables) -> tuple[torch.Tensor, ...]:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (each(hidden).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        return *apply_rotary_pos_emb(q, k, *tables), v

    def mask(self, mask: Any) -> Any:
        return mask

    def options(self) -> dict[str, Any]:
        return {}

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        q, k, v = self.operands(hidden_states, position_embeddings)
        mask, options = self.mask(attention_mask), self.options()
        out, weights = interface(self, q, k, v, mask, scaling=self.scaling, **options, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class _Selects(_Attention):
    """Passes on which keys to see, for attention functions that know of it."""

    def options(self):
        return {"indices": torch.zeros(1, dtype=torch.long)}


class _MasksUnderKnownNames(_Attention):
    """Hides the first key, under the names for which its author made masks."""

    def mask(self, mask):
        if mask is None or self.config._attn_implementation not in ("eager", "sdpa"):
            return mask
        first = (torch.arange(mask.shape[-1]) == 0) & (torch.arange(mask.shape[-2])[:, None] > 0)
        return mask & ~first if mask.dtype == torch.bool else mask.masked_fill(first, -1e9)


class _Cuts(_Attention):
    """Gives the last queries' part of the mask, which are all here."""

    def mask(self, mask):
        return None if mask is None else mask[:, :, -12:]


class _OptionUnderKnownNames(_Attention):
    """Scales scores by another factor under the names that it knows."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        q, k, v = self.operands(hidden_states, position_embeddings)
        scaling = self.scaling / 2 if self.config._attn_implementation in ("eager", "sdpa") else self.scaling
        out, weights = interface(self, q, k, v, attention_mask, scaling=scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class _OneKeyMore(_Attention):
    """Has a key before the first token."""

    def operands(self, hidden, tables):
        q, k, v = super().operands(hidden, tables)
        return q, *(torch.nn.functional.pad(each, (0, 0, 1, 0)) for each in (k, v))

    def mask(self, mask):
        return torch.nn.functional.pad(mask, (1, 0)) if isinstance(mask, torch.Tensor) else mask


class _IsGivenKeys(_Attention):
    """Selects the keys that it is given, as layers do that share the selection of an earlier one."""

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, chosen=None, **kwargs
    ):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        q, k, v = self.operands(hidden_states, position_embeddings)
        options = {} if chosen is None else {"indices": chosen}
        out, weights = interface(self, q, k, v, attention_mask, scaling=self.scaling, **options, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class _IsGivenAScale(_Attention):
    """Scales its queries by what it is given, such as a function of their positions."""

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, scale=None, **kwargs
    ):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        q, k, v = self.operands(hidden_states, position_embeddings)
        q = q if scale is None else q * scale
        out, weights = interface(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def llama_with(attention: type[LlamaAttention]) -> Any:
    model = build("llama").train()
    for layer in model.model.layers:
        layer.self_attn.__class__ = attention
    return model


LEFT = {
    _Selects: "its attention passes indices, which our attention does not compute",
    _MasksUnderKnownNames: "it calls its attention function in another way where the implementation is 'sdpa'",
    _OptionUnderKnownNames: "it calls its attention function in another way where the implementation is 'sdpa'",
    _Cuts: "it takes parts of its mask, which our attention does not build",
    _OneKeyMore: "its keys are not those of its tokens",
    _IsGivenKeys: "its forward also takes chosen",
}


@pytest.mark.parametrize("attention", LEFT)
def test_left_alone_with_the_reason(attention):
    model = llama_with(attention)
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert (row.applied, row.reason) == (False, LEFT[attention])
    assert implementation(model) == "sdpa"


@pytest.mark.parametrize("attention", [_Attention, _IsGivenAScale])
def test_others_are_proved(attention):
    model = llama_with(attention)
    expected = loss_and_gradients(eager(model), full())
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert row.applied, row.reason
    assert_same(loss_and_gradients(model, full()), expected, floor=1e-6)


@pytest.mark.parametrize("heads", [(4, 1, 16), (32, 2, 64), (8, 4, 512)], ids=str)
def test_any_draw_proves_a_scale_of_one(heads):
    """Scores as they are drawn would be near one-hot; and 16 heads share a key, whose gradients are sums."""
    many, few, size = heads
    sizes = {"hidden_size": 64, "num_attention_heads": many, "num_key_value_heads": few, "head_dim": size}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, intermediate_size=64, num_hidden_layers=1))
    model.model.layers[0].self_attn.scaling = 1.0
    for seed in range(8):
        probe = Probe(torch.device("cpu"))
        probe._generator.manual_seed(seed)
        with probe.isolated():
            (finding,) = find_attention(model, True, probe)
        assert finding.kernel, (seed, finding.reason)


@pytest.mark.parametrize(
    ("head_dim", "proved", "dropout", "ours"),
    [(264, True, 0.0, True), (256, True, 0.0, False), (264, False, 0.0, False), (264, True, 1e-30, False)],
)
def test_rows_of_wide_heads_without_a_mask_are_ours(head_dim, proved, dropout, ours, monkeypatch):
    """torch has no fast kernel for them; a static cache has places behind the queries, which are not there yet."""
    module = torch.nn.Identity()
    module.is_causal, module.num_key_value_groups = True, 2
    if proved:
        module.__dict__[PROVED] = True
    q, k, v = (torch.randn(1, heads, length, head_dim) for heads, length in ((2, 9), (1, 12), (1, 12)))
    keys, values = (x[:, :, :9].repeat_interleave(2, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attention_forward(module, q, k, v, None, dropout=dropout)[0], expected)
    plans, native = [], interface.attention
    monkeypatch.setattr(interface, "use_triton", lambda q: True)
    monkeypatch.setattr(interface, "attention", lambda *x, **o: plans.append(o["plan"]) or native(*x, **o))
    torch.testing.assert_close(attention_forward(module, q, k, v, None, dropout=dropout)[0], expected)
    assert plans == ([AttentionPlan(0, None, 9)] if ours else [])


class _CutsAround(LlamaModel):
    """Cuts the masks of its last layers, in a way that depends on the implementation, as those that share keys do."""

    def _last(self, masks):
        return masks if self.config._attn_implementation == "flex_attention" else masks[:, :, -1:]


def test_a_model_that_treats_masks_by_the_name_of_its_attention_is_left_alone():
    model = build("llama")
    assert attention_rows(apply_liger_kernel(copy.deepcopy(model), ONLY))[0].applied
    model.model.__class__ = _CutsAround
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert row.reason == "_CutsAround._last treats masks by the name of the attention, and does not know ours"
    assert implementation(model) == "sdpa"
