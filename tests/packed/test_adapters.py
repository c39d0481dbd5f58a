"""Adapters on packed weights: they start whole, train, and have the gradients that the dequantised model gives them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    C3AConfig,
    HRAConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    OSFConfig,
    PeftModel,
    get_peft_model,
)

from liger_trainer import apply_liger_kernel, load_packed
from liger_trainer.packed.experts import packed_stacks
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.patching.lora.guards import refuse_what_reads_weights
from tests.attention.families import BATCHES
from tests.packed.test_loading import IDS, MIXTURES, dequantised
from tests.packed_checkpoints import FORMATS, write_dense, write_indexed, write_mixture

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LINEARS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ATTENTION = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ON_EXPERTS = {"r": 4, "target_modules": ATTENTION, "target_parameters": EXPERTS, "lora_dropout": 0.0}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def adapted(model, patched=True, checkpointing=None, **lora):
    """`model` with adapters that are not zero, the same for any model with the same names."""
    model.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(**lora))
    generator = torch.Generator().manual_seed(5)
    for name, each in sorted(model.named_parameters()):
        if "lora_" in name:
            each.data.copy_(torch.randn(each.shape, generator=generator) * 0.1)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
        model.train()
    report = apply_liger_kernel(model) if patched else None
    return model, report


def results(model):
    """The loss and every adapter's gradient."""
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    assert gradients
    assert all(each is not None and each.any() for each in gradients.values())
    return out.loss.detach(), out.logits.detach().float(), gradients


def assert_same(one, other, dtype):
    """One unit of rounding of the loss, and of the norm of logits and gradients."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=0)
    assert (one[1] - other[1]).norm() <= tolerance * other[1].norm()
    assert one[2].keys() == other[2].keys()
    for name, expected in other[2].items():
        assert (one[2][name] - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_linear_layers(name, patched, tmp_path):
    meant = write_dense(tmp_path, name)
    for dtype in TOLERANCE:
        packed = load_packed(str(tmp_path), dtype=dtype)
        plain = dequantised(packed, meant)
        models = [adapted(each, patched, **LINEARS) for each in (packed, plain)]
        assert_same(*(results(model) for model, _ in models), dtype)
        if patched:
            (row,) = (row for row in models[0][1].rows if row.component == "lora" and row.target == "lora.Linear")
            assert (row.count, row.applied) == (14, True)
            assert row.kernel.startswith("lora_linear (packed ")
            unlike = {(row.component, row.target) for row in models[1][1].rows if row.applied}
            assert {(row.component, row.target) for row in models[0][1].rows if row.applied} == unlike


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["fp8 blocks", "int4"])
def test_checkpointed_layers(name, reentrant, tmp_path):
    meant = write_dense(tmp_path, name)
    for dtype in TOLERANCE:
        packed = load_packed(str(tmp_path), dtype=dtype)
        plain = dequantised(packed, meant)
        models = [adapted(each, checkpointing=reentrant, **LINEARS)[0] for each in (packed, plain)]
        assert_same(*(results(model) for model in models), dtype)


def experts_of(name, folder, dtype):
    """A packed mixture, and the dequantised one."""
    make, config, _ = MIXTURES[name]
    meant = make(folder)
    packed = load_packed(str(folder), dtype=dtype)
    if config is None:
        return packed, dequantised(packed, meant)
    plain = type(packed).from_pretrained(folder, dtype=dtype, quantization_config=config(dequantize=True))
    return packed, plain


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name, checkpointing, tmp_path):
    for dtype in TOLERANCE:
        models = [
            adapted(each, checkpointing=checkpointing, **ON_EXPERTS) for each in experts_of(name, tmp_path, dtype)
        ]
        rows = [(row.component, row.target, row.applied) for row in models[0][1].rows if row.component != "other"]
        assert ("lora", "lora.ParamWrapper", True) in rows
        assert all(shown for component, _, shown in rows if component == "experts")
        assert_same(*(results(model) for model, _ in models), dtype)


def test_adapters_of_experts_have_the_names_of_those_of_the_dequantised_model(tmp_path):
    packed, plain = (
        get_peft_model(each, LoraConfig(**ON_EXPERTS)) for each in experts_of("fp8 blocks", tmp_path, None)
    )
    names = [
        {name: each.shape for name, each in model.named_parameters() if "lora_" in name} for model in (packed, plain)
    ]
    assert names[0] == names[1]
    packed.save_pretrained(tmp_path / "adapters")
    PeftModel.from_pretrained(experts_of("fp8 blocks", tmp_path, None)[1], tmp_path / "adapters")


def test_adapters_start_in_fp32_with_all_their_values(tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    for cast in (True, False):
        model = load_packed(str(tmp_path), dtype="auto")
        model = get_peft_model(model, LoraConfig(**LINEARS), autocast_adapter_dtype=cast)
        a = {name: each for name, each in model.named_parameters() if "lora_A" in name}
        assert len(a) == 14
        assert all(each.dtype == torch.float32 and each.unique().numel() > 0.9 * each.numel() for each in a.values())


def test_an_adapter_may_be_switched_off_and_a_second_one_added(tmp_path):
    write_mixture(tmp_path)
    model, _ = adapted(load_packed(str(tmp_path), dtype=torch.float32), **ON_EXPERTS)
    base = load_packed(str(tmp_path), dtype=torch.float32)
    apply_liger_kernel(base)
    before = model(IDS).logits
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS).logits, base(IDS).logits)
    assert not torch.allclose(before, base(IDS).logits)
    model.add_adapter("ref", LoraConfig(**ON_EXPERTS))
    apply_liger_kernel(model)
    torch.testing.assert_close(model(IDS).logits, before)
    model.set_adapter("ref")  # which is as it was made, and adds nothing
    torch.testing.assert_close(model(IDS).logits, base(IDS).logits)


def test_a_packed_stack_is_saved_for_the_backward_and_not_what_it_decodes(tmp_path):
    write_mixture(tmp_path)
    model, _ = adapted(load_packed(str(tmp_path), dtype=torch.bfloat16), **ON_EXPERTS)
    experts = next(each for each in model.modules() if packed_stacks(each))
    stack = packed_stacks(experts)["gate_up_proj"]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        loss = model(input_ids=IDS, labels=IDS).loss
    sizes = {tensor.shape for tensor in kept}
    assert stack.shape not in sizes
    loss.backward()


MERGES = {"merge_adapter": {}, "merge_and_unload": {}, "safely": {"safe_merge": True}}


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("name", ["fp8 blocks", "mxfp4"])
def test_merging_is_refused_before_anything_is_merged(name, merge, tmp_path):
    """Of gpt-oss the attention is in 16 bits, and comes first."""
    model, _ = adapted(experts_of(name, tmp_path, torch.float32)[0], **ON_EXPERTS)
    before, names = model(IDS).logits, [key for key, _ in model.named_parameters()]
    with pytest.raises(
        RuntimeError, match=r"^Adapters cannot be merged into a packed base: .* merge with `liger-trainer merge`; or"
    ):
        getattr(model, "merge_and_unload" if merge == "safely" else merge)(**MERGES[merge])
    assert [key for key, _ in model.named_parameters()] == names
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("merge", MERGES)
def test_packed_experts_refuse_to_be_merged_by_themselves(merge, tmp_path):
    """On a model of one's own, before `apply_liger_kernel` has seen it."""
    on_experts = {**ON_EXPERTS, "target_modules": []}
    model, _ = adapted(experts_of("mxfp4", tmp_path, torch.float32)[0], patched=False, **on_experts)
    with pytest.raises(
        RuntimeError, match=r"^`\w+_proj` of packed experts is held as codes, .* with `liger-trainer merge`"
    ):
        getattr(model, "merge_and_unload" if merge == "safely" else merge)(**MERGES[merge])


def test_adapters_on_16_bits_are_merged(tmp_path):
    model, _ = adapted(experts_of("mxfp4", tmp_path, torch.float32)[0], r=4, target_modules=["q_proj", "k_proj"])
    before = model(IDS).logits
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, before)


def test_what_reads_weights_is_refused(tmp_path):
    write_dense(tmp_path / "dense", "fp8 blocks")
    model, _ = adapted(load_packed(str(tmp_path / "dense"), dtype="auto"), patched=False, **LINEARS)
    refuse_what_reads_weights(model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(RuntimeError, match="cannot be merged into a packed base: merging needs its floating weig"):
            merge()
    write_mixture(tmp_path / "mixture")
    model, _ = adapted(load_packed(str(tmp_path / "mixture"), dtype="auto"), patched=False, **ON_EXPERTS)
    refuse_what_reads_weights(model)
    with pytest.raises(RuntimeError, match="Adapters on packed experts run in our operator alone"):
        model(IDS)


@pytest.mark.parametrize("name", ["q_proj", "experts", "mlp"])
def test_peft_alone_says_why_codes_are_not_trained(name, tmp_path):
    write_mixture(tmp_path)
    model = load_packed(str(tmp_path), dtype="auto")
    with pytest.raises(
        RuntimeError, match=r"^Codes of a packed weight cannot be trained\. .* such as 'lm_head'\. Or load"
    ):
        get_peft_model(model, LoraConfig(target_modules=["v_proj"], modules_to_save=[name]))
    get_peft_model(load_packed(str(tmp_path)), LoraConfig(target_modules=["v_proj"], modules_to_save=["mlp.gate"]))


def test_a_packed_model_whose_weights_are_to_be_trained(tmp_path):
    write_dense(tmp_path, "nvfp4")
    model = load_packed(str(tmp_path), dtype="auto")
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="Codes of a packed weight cannot be trained"):
            each.requires_grad_(True)
        each.requires_grad_(False)


@pytest.mark.parametrize("name", ["fp8 rows", "mxfp4"])
def test_peft_alone_says_what_to_do_and_leaves_the_model_whole(name, tmp_path):
    """On a model of one's own, before any trainer has seen it."""
    model, _ = adapted(experts_of(name, tmp_path, torch.float32)[0], patched=False, **ON_EXPERTS)
    names = [key for key, _ in model.named_parameters()]
    with pytest.raises(RuntimeError, match=r"Adapters on packed experts run in our operator alone. Call `apply_liger_"):
        model(IDS)
    with pytest.raises(
        RuntimeError, match=r"^Adapters on packed experts run in our operator alone. Call `apply_liger_"
    ):
        del next(each for each in model.modules() if packed_stacks(each)).down_proj
    assert [key for key, _ in model.named_parameters()] == names
    with model.disable_adapter():
        model(IDS)
    apply_liger_kernel(model)
    whole, _ = adapted(experts_of(name, tmp_path, torch.float32)[0], **ON_EXPERTS)
    assert torch.equal(model(IDS).logits, whole(IDS).logits)


READING = {
    "DoRA": LoraConfig(**LINEARS, use_dora=True),
    "PiSSA": LoraConfig(**LINEARS, init_lora_weights="pissa"),
    "PiSSA in a few steps": LoraConfig(**LINEARS, init_lora_weights="pissa_niter_4"),
    "OLoRA": LoraConfig(**LINEARS, init_lora_weights="olora"),
    "MiCA": LoraConfig(**LINEARS, init_lora_weights="mica"),
    "HRA": HRAConfig(**LINEARS),
    "OSF": OSFConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", READING)
def test_adapters_that_read_the_weight_are_refused_in_one_line(name, tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    model = load_packed(str(tmp_path), dtype="auto")
    with pytest.raises(RuntimeError, match=r"The values of `weight` are asked for, but .*\.$") as raised:
        get_peft_model(model, READING[name])(IDS)
    assert "\n" not in str(raised.value)


def test_neither_merging_nor_reading_a_weight_is_silent(tmp_path):
    """On a model of one's own, before any trainer has seen it."""
    write_dense(tmp_path, "int4")
    model = get_peft_model(load_packed(str(tmp_path), dtype="auto"), LoraConfig(**LINEARS))
    weight = model.base_model.model.model.layers[0].mlp.up_proj.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((192, 128), torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="The values of `weight` are asked for"):
        weight @ torch.ones(128, 1)
    with pytest.raises(RuntimeError, match="The values of `weight` are asked for"):
        model.merge_adapter()


def test_initialising_packed_weights_names_what_was_called(tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    model = load_packed(str(tmp_path), dtype="auto")
    with pytest.raises(RuntimeError, match=r"^`normal_` would initialise `weight`, .* such as `init_weights`, .*\.$"):
        model.init_weights()


OTHER_METHODS = {
    "orthogonal": LoraConfig(**LINEARS, init_lora_weights="orthogonal"),
    "LoHa": LoHaConfig(**LINEARS),
    "LoKr": LoKrConfig(**LINEARS),
    "AdaLoRA": AdaLoraConfig(**{**LINEARS, "r": None, "init_r": 4}, total_step=10),
    "C3A": C3AConfig(target_modules="all-linear", task_type="CAUSAL_LM", block_size=32),
    "OFT": OFTConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_methods_that_read_no_values_have_the_gradients_of_the_dequantised_model(name, tmp_path):
    meant = write_dense(tmp_path, "fp8 blocks")
    packed = load_packed(str(tmp_path), dtype=torch.float32)
    results_of = []
    for model in (packed, dequantised(packed, meant)):
        torch.manual_seed(0)
        model = get_peft_model(model.requires_grad_(False), copy.deepcopy(OTHER_METHODS[name]))
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        results_of.append((loss.detach(), loss.detach(), gradients))
    assert any(each is not None and each.any() for each in results_of[0][2].values())
    assert_same(*results_of, torch.float32)


SPARSE = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text")  # the class reads the dtype of `weights_proj`


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("name", SPARSE)
def test_an_indexer_whose_weights_are_packed_selects_as_the_dequantised_one(name, patched, dtype, tmp_path):
    model_class, meant = write_indexed(tmp_path, name)
    for targets in (["q_b_proj"], ["q_b_proj", "weights_proj"]):
        packed = load_packed(str(tmp_path), model_class, dtype=dtype)
        names = [path for path, each in packed.named_modules() if isinstance(each, PackedLinear)]
        assert any(path.endswith("indexer.weights_proj") for path in names)
        losses = []
        for model in (packed, dequantised(packed, meant)):
            model, _ = adapted(model, patched, r=4, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
            loss = model(**BATCHES["full"](), use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=TOLERANCE[dtype], atol=0)
