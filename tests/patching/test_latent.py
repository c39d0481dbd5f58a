"""Latent attention: keys and values in one pass and queries rotated as a whole, in every family that has it."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching import last_columns, latent
from liger_trainer.patching.binding import bound_methods, bound_modules
from liger_trainer.patching.last_columns import LastColumns
from tests.patching.comparisons import LAYERS, assert_as_near_to_the_truth, assert_same, loss_and_gradients
from tests.tiny_models import COMMON, _build, tiny_batch

KEYS, QUERIES = "expand_keys", "expand_keys, whole queries rotated"
ALONE = {**dict.fromkeys(("attention", "rms_norm", "swiglu", "router", "experts", "recurrence"), False), **LAYERS}
"""Latent attention and its rotation, without the other kernels."""

_SIZES = {
    **{"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "qk_head_dim": 14, "moe_intermediate_size": 16, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4},
    "num_local_experts": 4,
}
FAMILIES = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v3, q_proj": {"q_lora_rank": None},
    "deepseek_v3, halves": {"rope_interleave": False},
    "deepseek_v3, biases": {"attention_bias": True},
    "glm4_moe_lite": {},
    "mistral4": {"head_dim": 14, "experts_implementation": "eager"},
    "longcat_flash": {
        "head_dim": 4,
        "num_layers": 1,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
    },
    "minicpm3": {},
    "youtu": {},
    "axk1": {},
    "kimi_linear": _LINEAR,
    "bailing_hybrid": {**_LINEAR, "head_dim": 8, "n_group": 2},
}
WITHOUT_QUERIES = ("kimi_linear",)
"""Which has no positions."""

families = pytest.mark.parametrize("family", FAMILIES)


def built(family, **fields):
    name = family.partition(",")[0]
    config = CONFIG_MAPPING[name](**{**COMMON, **_SIZES, **FAMILIES[family], **fields})
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return _build(mapping[type(config)], config).train()


def batch_of(model, **options):
    return tiny_batch("llama", model, **options)


def latent_rows(report):
    return [row for row in report if row.component == "latent"]


def attentions(model):
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


@families
def test_loss_and_every_gradient(family, calls_of, monkeypatch):
    model = built(family)
    batch = batch_of(model)
    expected = loss_and_gradients(model, batch)
    (row,) = latent_rows(apply_liger_kernel(model, ALONE))
    assert row.kernel == (KEYS if family in WITHOUT_QUERIES else QUERIES)
    assert row.count == len(attentions(model))
    assert row.probe_error <= 1e-5
    calls = calls_of(latent, "expand_keys")
    joins = []
    behind = LastColumns.behind
    monkeypatch.setattr(LastColumns, "behind", lambda self, front: joins.append(behind(self, front)) or joins[-1])
    assert_same(loss_and_gradients(model, batch), expected, floor=1e-6)
    assert len(calls) == row.count
    scaled = family == "longcat_flash"  # its queries are multiplied in two parts, which lie apart
    assert len(joins) == (0 if scaled or family in WITHOUT_QUERIES else row.count)
    assert all(each is not None for each in joins)
    assert revert_liger_kernel(model) > 0
    again = loss_and_gradients(model, batch)
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


@families
def test_with_all_kernels_packed_and_padded(family):
    """Documents in one row, and padding before one: the loss and gradients of the same kernels without these two."""
    model = built(family)
    other = copy.deepcopy(model)
    apply_liger_kernel(model, LAYERS)
    apply_liger_kernel(other, {**LAYERS, "latent": False})
    padded = batch_of(model)
    positions = torch.tensor([[*range(5), *range(3), *range(4)], [*range(2), *range(9), *range(1)]])
    packed = {"input_ids": padded["input_ids"].clamp_min(3), "position_ids": positions, "use_cache": False}
    packed["labels"] = packed["input_ids"].clone()
    for batch in (padded, packed):
        assert_same(loss_and_gradients(model, batch), loss_and_gradients(other, batch), floor=1e-6)


@families
def test_bf16_is_as_near_to_the_truth_as_the_model_itself(family):
    model = built(family).to(torch.bfloat16)
    assert_as_near_to_the_truth(model, {**ALONE, "rope": False}, lambda m, seed: batch_of(m, seed=seed), times=1.1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_checkpointed(family, reentrant):
    model = built(family)
    batch = batch_of(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, ALONE)
    assert_same(loss_and_gradients(model, batch), expected, floor=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v3, q_proj", "minicpm3"])
def test_adapters_on_every_projection(family):
    model = get_peft_model(built(family), LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4)).train()
    batch = batch_of(model)
    expected = loss_and_gradients(model, batch)
    assert any("kv_b_proj.lora_A" in name for name in expected)
    (row,) = latent_rows(apply_liger_kernel(model, LAYERS))
    assert row.kernel == QUERIES
    assert_same(loss_and_gradients(model, batch), expected, floor=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equal(family):
    model = built(family).eval()
    prompt = batch_of(model)["input_ids"][:1, :6]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    apply_liger_kernel(model, LAYERS)
    assert torch.equal(model.generate(prompt, **options), expected)


def test_compiled():
    model = built("deepseek_v3")
    batch = batch_of(model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, ALONE)
    torch.compiler.reset()
    for module in attentions(model):
        module.compile(backend="aot_eager", fullgraph=True)
    assert_same(loss_and_gradients(model, batch), expected, floor=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# What is bound
# ---------------------------------------------------------------------------------------------------------------------


def test_switched_off():
    model = built("deepseek_v3")
    (row,) = latent_rows(apply_liger_kernel(model, {"latent": False}))
    assert row.kernel is None
    assert row.reason == "switched off in liger_kernel_config"
    assert not any(map(bound_methods, model.modules()))


def test_without_the_rotation():
    model = built("deepseek_v3")
    batch = batch_of(model)
    expected = loss_and_gradients(model, batch)
    (row,) = latent_rows(apply_liger_kernel(model, {**ALONE, "rope": False}))
    assert row.kernel == KEYS
    assert_same(loss_and_gradients(model, batch), expected)
    assert len(list(bound_modules(model))) == 2
    assert revert_liger_kernel(model) == 2
    assert not any("expand_kv" in vars(module) or "__getstate__" in vars(module) for module in model.modules())
    assert revert_liger_kernel(model) == 0


def test_a_copy_has_methods_of_its_own_and_a_pickle_none():
    model = built("deepseek_v3")
    batch = batch_of(model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, {**ALONE, "rope": False})
    for one, other in zip(attentions(copy.deepcopy(model)), attentions(model)):
        assert one.expand_kv.__self__ is one
        assert one.expand_kv.__func__ is other.expand_kv.__func__
        assert not bound_methods(copy.copy(other))
    unpickled = pickle.loads(pickle.dumps(model))
    assert not any(map(bound_methods, unpickled.modules()))
    assert_same(loss_and_gradients(unpickled, batch), expected)


class Latent(nn.Module):
    """A method like that of models."""

    def __init__(self, heads=2):
        super().__init__()
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 6, 4, 5
        self.kv_b_proj = nn.Linear(7, heads * 11, bias=False)

    def expand_kv(self, latents, shared):
        kv = self.kv_b_proj(latents).view(*latents.shape[::2], -1, 11).transpose(1, 2)
        own, value = kv.split([6, 5], dim=-1)
        return self.key(own, shared.expand(-1, own.shape[1], -1, -1)), value

    def key(self, own, shared):
        return torch.cat((own, shared), dim=-1)

    def forward(self, latents, shared):
        return self.expand_kv(latents, shared)


def variant(**methods):
    return type("Latent", (Latent,), methods)


OTHERS = {
    "the shared columns first": variant(key=lambda self, own, shared: torch.cat((shared, own), dim=-1)),
    "scaled": variant(key=lambda self, own, shared: torch.cat((own, 1.01 * shared), dim=-1)),
    "of the first head alone": variant(
        key=lambda self, own, shared: torch.cat((own, shared * (torch.arange(own.shape[1]) < 1)[:, None, None]), dim=-1)
    ),
    "limited": variant(key=lambda self, own, shared: torch.cat((own.clamp(-100.0, 100.0), shared), dim=-1)),
    "no gradient of the shared key": variant(key=lambda self, own, shared: torch.cat((own, shared.detach()), dim=-1)),
    "another in evaluation": variant(
        key=lambda self, own, shared: torch.cat((own, shared if self.training else -shared), dim=-1)
    ),
}


def test_a_method_of_any_class_is_taken():
    module = Latent()
    latents, shared = torch.randn(2, 1, 3, 7), torch.randn(2, 1, 3, 4)
    expected = module(latents, shared)
    (row,) = latent_rows(apply_liger_kernel(module))
    assert row.kernel == KEYS
    assert all(map(torch.equal, module(latents, shared), expected))


@pytest.mark.parametrize("name", OTHERS)
def test_another_formula_is_left_alone(name):
    module = OTHERS[name]()
    (row,) = latent_rows(apply_liger_kernel(module))
    assert row.kernel is None
    assert row.reason
    assert not bound_methods(module)


def test_another_method_of_the_instance_stays():
    module = Latent()
    module.expand_kv = own = lambda latents, shared: (latents, shared)
    (row,) = latent_rows(apply_liger_kernel(module))
    assert row.reason == "its expand_kv is already overridden"
    assert module.expand_kv is own


def test_a_method_that_the_class_got_since_runs(monkeypatch):
    module = variant()()
    apply_liger_kernel(module)
    monkeypatch.setattr(type(module), "expand_kv", lambda self, latents, shared: "another")
    assert module.expand_kv(None, None) == "another"


# ---------------------------------------------------------------------------------------------------------------------
# Queries
# ---------------------------------------------------------------------------------------------------------------------


def queries(heads=3, nope=5, rope=4):
    whole = torch.randn(2, 6, heads * (nope + rope), dtype=torch.float64, requires_grad=True) * 1.0
    parts = whole.view(2, 6, heads, nope + rope).transpose(1, 2).split([nope, rope], dim=-1)
    return whole, *parts


def rotate(q, k, first=0):
    """Stands for a rotation."""
    return torch.cat((q[..., :first], q[..., first:] * 2.0), dim=-1), k * 2.0


rotated = partial(last_columns.rotate_last_columns, rotate, dim=1, dtype=torch.float64)


def test_parts_of_one_tensor_are_joined_without_the_gradient_of_a_split():
    whole, front, columns = queries()
    pending, _ = rotated(columns, columns)
    assert isinstance(pending, LastColumns)
    joined = torch.cat((front, pending), dim=-1)
    expected = torch.cat((front, columns * 2.0), dim=-1)
    assert torch.equal(joined, expected)
    wave = torch.arange(joined.numel(), dtype=torch.float64).view(joined.shape).cos()
    assert torch.equal(
        *(torch.autograd.grad((y * wave).sum(), whole, retain_graph=True)[0] for y in (joined, expected))
    )
    names, nodes = set(), [joined.grad_fn]
    for node in nodes:
        names.add(node.name())
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert not any("Split" in name for name in names)


@pytest.mark.parametrize(
    "use",
    [
        lambda front, last: torch.cat((last, front), dim=-1),
        lambda front, last: torch.cat((front, last), dim=-1)[..., 1:],
        lambda front, last: torch.cat([front * 1.0, last], dim=-1),
        lambda front, last: torch.cat((front[..., 1:], last), dim=-1),
        lambda front, last: torch.cat((front.flip(1), last), dim=-1),
        lambda front, last: torch.cat((front.detach(), last), dim=-1),
        lambda front, last: torch.cat((front, last, last), dim=-1),
        lambda front, last: torch.cat((last, last), dim=0),
        lambda front, last: last + 1.0,
        lambda front, last: 2.0 * last.transpose(1, 2),
        lambda front, last: last.sum(),
    ],
)
def test_any_other_use_is_that_of_the_rotated_columns(use):
    whole, front, columns = queries()
    got, expected = use(front, rotated(columns, columns)[0]), use(front, columns * 2.0)
    torch.testing.assert_close(got, expected)
    one, other = (torch.autograd.grad(y.square().sum(), whole, retain_graph=True)[0] for y in (got, expected))
    torch.testing.assert_close(one, other)


def test_parts_of_different_queries_are_not_joined():
    (_, front, _), (_, _, columns) = queries(), queries()
    joined = torch.cat((front, rotated(columns, columns)[0]), dim=-1)
    assert torch.equal(joined, torch.cat((front, columns * 2.0), dim=-1))


def test_what_is_no_part_of_whole_queries_is_rotated_at_once():
    whole, front, columns = queries()
    for q in (columns.clone(), front, whole.view(2, 6, 3, 9).transpose(1, 2), columns[:, :2], columns[..., 1:3]):
        assert isinstance(rotated(q, q)[0], torch.Tensor)
    assert isinstance(last_columns.rotate_last_columns(rotate, columns, columns, 1, torch.float32)[0], torch.Tensor)
