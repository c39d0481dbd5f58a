"""The contract of apply and revert: what is refused, what stays untouched, and who comes first."""

from __future__ import annotations

import copy
import functools
import io
import json
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import is_kernels_available

from liger_trainer import KernelConfig, apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.binding import bound_modules
from liger_trainer.patching.trial import Trial
from tests.patching import toys
from tests.patching.comparisons import LAYERS, assert_same, loss_and_gradients
from tests.tiny_models import TINY_MODELS, tiny_batch


def only_row(model, **config):
    (row,) = apply_liger_kernel(model, {**LAYERS, **config})
    return row


@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        (toys.Norm(), "rms_norm (casting=llama)"),
        (toys.NoCasts(), "rms_norm (casting=none)"),
        (toys.WiderUnderAutocast(), "rms_norm (casting=llama)"),
        (nn.RMSNorm(8, eps=1e-5), "rms_norm (casting=olmo2)"),
        (nn.RMSNorm(8, eps=1e-5, elementwise_affine=False), "rms_norm"),
        (nn.LayerNorm(8), "layer_norm"),
        (toys.CenteredNorm(), "layer_norm"),
        (toys.MLP(), "swiglu"),
        (toys.MLP(act=nn.SiLU()), "swiglu"),
        (toys.MLP(act=nn.GELU()), "geglu (exact)"),
        (toys.MLP(act=functools.partial(F.gelu, approximate="tanh")), "geglu (tanh)"),
    ],
)
def test_unknown_family_with_a_known_formula_is_patched(module, kernel):
    model = toys.Toy(it=module)
    x = torch.randn(3, 8, requires_grad=True)
    expected = model(x)
    assert only_row(model).kernel == kernel
    assert is_bound_by_us(module)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (toys.EpsOutsideTheRoot(), "none of the RMSNorm formulas"),
        (toys.DetachedScale(), "none of the RMSNorm formulas"),
        (toys.OptionalGate(), "none of the formulas of RMSNorm with a gate"),
        (toys.TwoOptions(), "takes more than the hidden states"),
        (toys.Raises(), "could not run its forward: RuntimeError: only on a Tuesday"),
        (nn.RMSNorm((2, 8), eps=1e-5), "another formula than LayerNorm's"),
        (nn.RMSNorm((2, 2, 8), eps=1e-5), "neither of a row nor of heads"),
        (nn.LayerNorm((2, 8)), "normalises over 2 dimensions"),
        (toys.ActOnUp(), "neither silu(gate) * up nor gelu_tanh(gate) * up nor gelu(gate) * up"),
        (toys.ClampedGate(), "neither silu"),
        (toys.MLP(act=nn.ReLU()), "neither silu(gate) * up nor gelu_tanh(gate) * up nor gelu(gate) * up (ReLU)"),
        (toys.MLP(act=nn.PReLU()), "act_fn besides"),
        (
            toys.MLP(act=nn.Sequential(nn.SiLU(), nn.Dropout(0.5))).eval(),
            "in training it draws random numbers, as dropout does",
        ),
    ],
)
def test_subtly_different_is_left_alone_with_the_reason(module, reason):
    row = only_row(toys.Toy(it=module))
    assert not row.applied
    assert reason in row.reason
    assert row.target == type(module).__name__
    assert "forward" not in module.__dict__


def test_groups_and_batches_are_no_row_norms():
    assert len(apply_liger_kernel(toys.Toy(a=nn.BatchNorm1d(8), b=nn.GroupNorm(2, 8)), LAYERS)) == 0


def test_instances_of_one_class_are_judged_one_by_one():
    model = toys.Toy(a=toys.MLP(act=F.silu), b=toys.MLP(act=F.relu), c=toys.MLP(act=F.silu))
    rows = apply_liger_kernel(model, LAYERS).rows
    assert [(row.kernel, row.count) for row in rows] == [("swiglu", 2), (None, 1)]


def test_keyword_call():
    norm, mlp = toys.Norm(), toys.MLP()
    apply_liger_kernel(toys.Toy(norm=norm, mlp=mlp), LAYERS)
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(states=x), norm(x))
    torch.testing.assert_close(mlp(states=x), mlp(x))


def test_probe_leaves_random_state_weights_and_hooks_alone():
    model = TINY_MODELS["qwen2_vl"]()
    weights = {name: (tensor.clone(), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    state = torch.get_rng_state()
    apply_liger_kernel(model, LAYERS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    after = model.state_dict(keep_vars=True)
    assert after.keys() == weights.keys()
    for name, (value, version) in weights.items():
        assert torch.equal(after[name], value)
        assert after[name]._version == version
        assert after[name].grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_callers_mode_does_not_matter(mode):
    expected = apply_liger_kernel(TINY_MODELS["phi3"](), LAYERS)
    with mode():
        assert apply_liger_kernel(TINY_MODELS["phi3"](), LAYERS) == expected


def test_thirty_two_layers_are_probed_once(calls_of):
    runs = calls_of(Trial, "compare")
    apply_liger_kernel(TINY_MODELS["llama"](num_hidden_layers=1), LAYERS)
    one_layer = len(runs)
    apply_liger_kernel(TINY_MODELS["llama"](num_hidden_layers=32), LAYERS)
    assert len(runs) == 2 * one_layer


def test_hooks_run_on_patched_modules():
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model, LAYERS)
    seen = []
    layer = model.model.layers[0]
    for module in (layer.mlp, layer.mlp.gate_proj, layer.input_layernorm, layer.self_attn):
        module.register_forward_hook(lambda module, args, output: seen.append(module))
    model(**tiny_batch("llama", model))
    assert len(seen) == 4


def test_deepcopy_carries_the_kernels():
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model, LAYERS)
    twin = copy.deepcopy(model)
    assert len(list(bound_modules(twin))) == len(list(bound_modules(model)))
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    assert not twin(**tiny_batch("llama", twin)).logits.any()
    assert revert_liger_kernel(twin) > 0
    assert list(bound_modules(model))


@pytest.mark.skipif(is_kernels_available(), reason="with the `kernels` library, no model of transformers has a pickle")
def test_pickled_model_is_the_plain_one():
    model = TINY_MODELS["llama"]()
    batch = tiny_batch("llama", model)
    expected = model(**batch).loss
    report = apply_liger_kernel(model, LAYERS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(**batch).loss, expected)
    assert apply_liger_kernel(loaded, LAYERS) == report


def test_foreign_override_is_left_alone_and_named():
    model = TINY_MODELS["llama"]()
    norm = model.model.norm
    original = norm.forward

    def somebodys_forward(self, x):
        return original(x)

    norm.forward = types.MethodType(somebodys_forward, norm)
    report = apply_liger_kernel(model, LAYERS)
    row = next(row for row in report.left_alone if row.component == "rms_norm")
    assert row.count == 1
    assert "somebodys_forward" in row.reason
    assert norm.forward.__func__ is somebodys_forward
    revert_liger_kernel(model)
    assert norm.forward.__func__ is somebodys_forward


def test_wrapper_with_the_forward_of_the_model_inside_keeps_it():
    """PEFT's `AdaptionPromptModel` has no forward of its own, and takes that of the model."""
    peft = pytest.importorskip("peft")
    native, ours = (TINY_MODELS["llama"]().train() for _ in range(2))
    apply_liger_kernel(ours)
    config = {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 1}
    adapted = []
    for model in (native, ours):
        torch.manual_seed(0)
        adapted.append(peft.get_peft_model(model, peft.AdaptionPromptConfig(**config)))
    batch = tiny_batch("llama", native)
    truth = loss_and_gradients(adapted[0], batch)
    assert apply_liger_kernel(adapted[1]).applied
    for _ in range(2):
        assert_same(loss_and_gradients(adapted[1], batch), truth, 1e-4)  # a gate is one number
        revert_liger_kernel(adapted[1])


def test_accelerate_hook_is_left_alone():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = TINY_MODELS["llama"]()
    add_hook_to_module(model.model.layers[0].mlp, ModelHook())
    report = apply_liger_kernel(model, LAYERS)
    row = next(row for row in report.left_alone if row.component == "swiglu")
    assert "accelerate.hooks" in row.reason


def test_switches():
    report = apply_liger_kernel(TINY_MODELS["llama"](), {**LAYERS, "rope": False, "rms_norm": False})
    assert {row.component for row in report.applied} == {"attention", "swiglu"}
    assert {row.reason for row in report.left_alone} == {"switched off in liger_kernel_config"}


def test_config_forms_are_one():
    model = TINY_MODELS["llama"]()
    mapping = {**LAYERS, "rope": False}
    expected = apply_liger_kernel(model, mapping)
    assert apply_liger_kernel(model, json.dumps(mapping)) == expected
    assert apply_liger_kernel(model, KernelConfig.parse(mapping)) == expected


def test_unknown_key_names_the_nearest():
    model = TINY_MODELS["llama"]()
    with pytest.raises(ValueError, match="did you mean 'rms_norm'"):
        apply_liger_kernel(model, {"rms_nrom": True})
    assert not list(bound_modules(model))


def test_data_parallel_is_refused():
    model = nn.DataParallel(TINY_MODELS["llama"]())
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        apply_liger_kernel(model)
    assert not list(bound_modules(model))


def test_not_a_module():
    with pytest.raises(TypeError, match="LlamaConfig"):
        apply_liger_kernel(TINY_MODELS["llama"]().config)


def test_strict_passes_where_all_is_applied():
    assert apply_liger_kernel(TINY_MODELS["llama"](), LAYERS, strict=True).applied


def test_strict_lists_everything_and_leaves_the_model_plain():
    model = TINY_MODELS["cohere"]()
    model.model.layers[0].mlp.forward = lambda states: states
    model.model.norm = toys.EpsOutsideTheRoot(32)
    with pytest.raises(ValueError, match="cannot be applied") as error:
        apply_liger_kernel(model, LAYERS, strict=True)
    assert "rms_norm: 1 x EpsOutsideTheRoot" in str(error.value)
    assert "swiglu: 1 x CohereMLP" in str(error.value)
    assert "apply_rotary_pos_emb" not in str(error.value)
    assert not list(bound_modules(model))


def test_strict_with_explicit_keys():
    config = {**LAYERS, "rope": False, "rms_norm": False}
    assert apply_liger_kernel(TINY_MODELS["cohere"](), config, strict=True).applied
    with pytest.raises(ValueError, match="geglu: the model has nothing of the kind"):
        apply_liger_kernel(TINY_MODELS["cohere"](), {**config, "geglu": True}, strict=True)


def test_fp32_norms_in_a_bf16_model():
    """What PEFT's `prepare_model_for_kbit_training` makes: the weights' dtype decides the result's."""
    model = TINY_MODELS["qwen3"]().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    batch = tiny_batch("qwen3", model)
    norm = model.model.layers[0].self_attn.q_norm
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    expected = norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(**batch).loss
    apply_liger_kernel(model, LAYERS)
    assert norm(x).dtype == expected.dtype == torch.float32
    torch.testing.assert_close(norm(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(**batch).loss, before, rtol=1e-2, atol=0)


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-5), toys.Norm(), toys.WiderUnderAutocast()])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_result_dtype(module, weights, inputs):
    module = copy.deepcopy(module).to(weights)
    x = torch.randn(2, 8, dtype=inputs)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = module(x)
        except RuntimeError:  # torch itself refuses the mix
            return
        apply_liger_kernel(toys.Toy(it=module), LAYERS)
        assert is_bound_by_us(module)
        got = module(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("applied_first", [True, False])
def test_recorded_outputs(applied_first):
    model = TINY_MODELS["qwen3_moe"]()
    model.set_attn_implementation("eager")
    batch = tiny_batch("qwen3_moe", model)
    options = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    if applied_first:
        plain = model(**batch, **options)  # installs transformers' recording hooks
    else:
        plain = TINY_MODELS["qwen3_moe"]()
        plain.set_attn_implementation("eager")
        plain = plain(**batch, **options)
    apply_liger_kernel(model, LAYERS)
    ours = model(**batch, **options)
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(ours[name]) == len(plain[name]) > 0
        for one, other in zip(plain[name], ours[name]):
            torch.testing.assert_close(one, other)


def test_state_dict_and_saved_model_are_the_plain_ones(tmp_path):
    from transformers import AutoModelForCausalLM

    model = TINY_MODELS["gemma2"]()  # tied embeddings
    keys = list(model.state_dict())
    batch = tiny_batch("gemma2", model)
    apply_liger_kernel(model, LAYERS)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not list(bound_modules(loaded))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(loaded(**batch).loss, model.eval()(**batch).loss)
