"""PEFT's adapters on stacked weights of experts: values and gradients are PEFT's own, without W + s B A."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.kernels.moe import expert_layers, expert_lora
from liger_trainer.patching.moe import experts_formula
from tests.calls import created_sizes
from tests.patching.comparisons import assert_as_near_to_the_truth, loss_and_gradients
from tests.patching.test_experts import MODELS
from tests.tiny_models import COMMON, TINY_MODELS, tiny_batch

EXPERTS = {**dict.fromkeys(KERNEL_KEYS, False), "experts": True, "lora": True}
BOTH = ("experts.gate_up_proj", "experts.down_proj")
FAMILIES = ("qwen3_moe", "gpt_oss", "llama4")


def build(family, **options):
    """A tiny model that runs its own loop over the experts."""
    if family == "llama4":
        return MODELS["llama4, two a token"][0](**options)
    return TINY_MODELS[family](experts_implementation="eager", **options)


def lora(parameters=BOTH, **options):
    return LoraConfig(target_modules=[], target_parameters=list(parameters), **{"r": 4, "lora_alpha": 6, **options})


def adapted(family="qwen3_moe", parameters=BOTH, dtype=torch.float32, **options):
    """A tiny model with adapters that are not zero, which PEFT runs with the model's own loop over the experts."""
    model = build(family).to(dtype)
    torch.manual_seed(0)
    return get_peft_model(model, lora(parameters, init_lora_weights=False, **options))


@pytest.fixture
def runs(monkeypatch):
    """How many adapters each call of the operator had, but for the probe's."""
    calls = []
    native = experts_formula.moe_experts

    def counting(*args, gate_up_adapters=(), down_adapters=(), **kwargs):
        if args[0].shape[1] == COMMON["hidden_size"]:
            calls.append((len(gate_up_adapters), len(down_adapters)))
        return native(*args, gate_up_adapters=gate_up_adapters, down_adapters=down_adapters, **kwargs)

    monkeypatch.setattr(experts_formula, "moe_experts", counting)
    return calls


def results(model):
    return loss_and_gradients(model, tiny_batch("qwen3_moe", model))


def assert_close(got, expected, tolerance=1e-4):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= tolerance * value.abs().max(), name


def assert_patched_is_native(model, runs, adapters=(1, 1)):
    revert_liger_kernel(model)
    expected = results(model)
    report = apply_liger_kernel(model, EXPERTS)
    assert all(row.applied for row in report if row.component in ("lora", "experts")), str(report)
    runs.clear()
    assert_close(results(model), expected)
    assert runs == [adapters] * 2  # a call for each layer
    return expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"r": 1, "use_rslora": True}], ids=str)
def test_loss_and_every_gradient(runs, family, options):
    model = adapted(family, **options)
    gradients = assert_patched_is_native(model, runs)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == {"loss", *trained}
    assert len(trained) == 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("projection", [0, 1])
def test_one_parameter(runs, family, projection):
    model = adapted(family, BOTH[projection : projection + 1])
    assert_patched_is_native(model, runs, adapters=(1 - projection, projection))


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_one_expert_is_left_to_peft(runs, family):
    """Whose adapters PEFT lays out as those of a linear layer."""
    sizes = {"num_experts": 1} if family == "qwen3_moe" else {"num_local_experts": 1}
    model = get_peft_model(build(family, **sizes, num_experts_per_tok=1), lora(init_lora_weights=False))
    assert_patched_is_native(model, runs, adapters=(0, 0))


def test_experts_called_with_every_token_are_left_to_peft(runs):
    """As Llama 4's own block does."""
    model = adapted("llama4")
    experts, x = model.base_model.model.model.layers[0].feed_forward.experts, torch.randn(4 * 3, 32)
    expected = experts(x)
    apply_liger_kernel(model, EXPERTS)
    runs.clear()
    torch.testing.assert_close(experts(x), expected, rtol=0, atol=0)
    assert not runs


def test_a_trained_base(runs):
    model = adapted()
    model.requires_grad_(True)
    assert_patched_is_native(model, runs)


def test_several_adapters(runs):
    model = adapted()
    model.add_adapter("second", lora(init_lora_weights=False, r=3))
    for active in (["second"], ["default", "second"]):
        model.base_model.set_adapter(active)
        assert_patched_is_native(model, runs, adapters=(len(active), len(active)))


tiny_batches = functools.partial(tiny_batch, "qwen3_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_wide_adapters_on_a_half_precision_base(runs, family):
    """As near to the wide result as PEFT, which rounds W + s B A."""
    model = adapted(family, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert_as_near_to_the_truth(model, EXPERTS, tiny_batches)
    assert set(runs) == {(1, 1)}


def test_autocast(runs):
    """The quotient is up to 1.09 with other weights, also in batches of twice the size."""
    model, under = adapted(), lambda: torch.autocast("cpu", torch.bfloat16)
    assert_as_near_to_the_truth(model, EXPERTS, tiny_batches, under, times=1.5)
    assert set(runs) == {(1, 1)}


def test_checkpoints(runs):
    model = adapted()
    expected = results(model)
    apply_liger_kernel(model, EXPERTS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    assert_close(results(model), expected)
    assert runs == [(1, 1)] * 4


def test_compiles_to_one_graph(runs):
    model = adapted()
    apply_liger_kernel(model, EXPERTS)
    experts = model.base_model.model.model.layers[0].mlp.experts
    x, weights = torch.randn(6, 32), torch.rand(6, 2)
    index = torch.tensor([[0, 1], [1, 2], [3, 0]] * 2)
    expected = experts(x, index, weights)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index, weights), expected)
    assert runs


def trained(model):
    """The model after a few steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        results(model)
        optimizer.step()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_and_merged_is_what_peft_saves_and_merges(tmp_path, family):
    stock = trained(adapted(family))
    ours = adapted(family)
    apply_liger_kernel(ours, EXPERTS)
    trained(ours)
    assert_close(get_peft_model_state_dict(ours), get_peft_model_state_dict(stock))
    ours.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(family), tmp_path)
    assert_close(get_peft_model_state_dict(loaded), get_peft_model_state_dict(stock))

    batch = tiny_batch("qwen3_moe", stock)
    with torch.no_grad():
        expected = ours(**batch).logits
        merged = ours.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, expected)
    assert_close(merged.state_dict(), stock.merge_and_unload().state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_disabling_and_merging_in_the_middle(runs, family):
    model = adapted(family)
    batch = tiny_batch("qwen3_moe", model)
    with torch.no_grad():
        base = build(family)(**batch).logits
        expected = model(**batch).logits
        apply_liger_kernel(model, EXPERTS)
        with model.disable_adapter():
            torch.testing.assert_close(model(**batch).logits, base)
        assert runs == [(0, 0)] * 2
        model.merge_adapter()
        torch.testing.assert_close(model(**batch).logits, expected)
        assert runs == [(0, 0)] * 4
        model.unmerge_adapter()
        torch.testing.assert_close(model(**batch).logits, expected)
    assert runs[4:] == [(1, 1)] * 2


def test_a_frozen_base_costs_no_gradient(monkeypatch):
    model = adapted()
    apply_liger_kernel(model, EXPERTS)
    shapes = []
    for module in (expert_layers, expert_lora):
        native = module.grouped_weight_gradient

        def counting(*args, native=native, **kwargs):
            shapes.append(native(*args, **kwargs).shape[1:])
            return native(*args, **kwargs)

        monkeypatch.setattr(module, "grouped_weight_gradient", counting)
    gradients = results(model)
    assert all("lora_" in name for name in gradients if name != "loss")
    assert len(shapes) == 8
    assert all(expert_lora.RANK_STEP in shape for shape in shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapted_weights_are_never_made(family):
    # Sizes and a rank with which nothing else has as many elements as a weight.
    sizes = {"intermediate_size": 72, "moe_intermediate_size": 40}
    model = build(family, **sizes)
    model = get_peft_model(model, lora(r=36))
    weights = [p for name, p in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(weights) == 4

    def made():
        return {weight.numel() for weight in weights} & created_sizes(lambda: results(model))

    assert len(made()) == 2
    apply_liger_kernel(model, EXPERTS)
    assert not made()


def _hook_on_experts(model):
    model.base_model.model.model.layers[0].mlp.experts.get_base_layer().register_forward_hook(lambda *_: None)


def _hook_on_inner_wrapper(model):
    model.base_model.model.model.layers[0].mlp.experts.base_layer.register_forward_pre_hook(lambda *_: None)


def _hook_on_factor(model):
    model.base_model.model.model.layers[0].mlp.experts.lora_A["default"].register_forward_hook(lambda *_: None)


def _split_over_processes(model):
    model.base_model.model.model.layers[0].mlp.experts.get_base_layer()._is_expert_parallel = True


@pytest.mark.parametrize(
    ("change", "first_layer"),
    [
        (_hook_on_experts, (0, 0)),
        (_hook_on_inner_wrapper, (1, 0)),
        (_hook_on_factor, (1, 0)),
        (_split_over_processes, (0, 0)),
    ],
)
def test_what_is_unknown_is_left_to_peft(runs, change, first_layer):
    """The outer wrapper's parameter is then PEFT's W + s B A; the inner one is asked in its turn."""
    model = adapted()
    expected = results(model)
    apply_liger_kernel(model, EXPERTS)
    change(model)
    assert_close(results(model), expected)
    assert runs == [first_layer, (1, 1)]


@pytest.mark.parametrize("switch", ["experts", "lora"])
def test_switches(runs, switch):
    model = adapted()
    expected = results(model)
    report = apply_liger_kernel(model, {**EXPERTS, switch: False})
    (row,) = [row for row in report if row.component == "lora"]
    assert not row.applied
    assert row.count == 4
    assert_close(results(model), expected)
    assert (1, 1) not in runs


def test_a_parameter_that_is_none_of_experts():
    model = adapted(parameters=("mlp.gate.weight",))
    (row,) = [row for row in apply_liger_kernel(model, EXPERTS) if row.component == "lora"]
    assert not row.applied
    assert row.reason == "weight of Qwen3MoeTopKRouter is no weight of experts; PEFT's own forward runs"


def test_reverting():
    model = adapted()
    apply_liger_kernel(model, EXPERTS)
    revert_liger_kernel(model)
    assert not [module for module in model.modules() if "forward" in module.__dict__]


def test_a_copy_has_adapters_of_its_own(runs):
    model = adapted()
    apply_liger_kernel(model, EXPERTS)
    before = results(model)
    other = copy.deepcopy(model)
    assert_close(results(other), before)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert results(other)["loss"] != before["loss"]
    assert_close(results(model), before)
    assert set(runs) == {(1, 1)}
