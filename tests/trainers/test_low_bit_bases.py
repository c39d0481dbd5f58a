"""Bases in 8 bits and fewer: what is trained either gets its gradient, or is refused with the name of a parameter."""

import contextlib
import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments, apply_liger_kernel
from liger_trainer.patching.codes import unscaled_weights
from liger_trainer.trainers.checks.low_bit import check_low_bit_weights, first_gradients_checked
from tests.low_bit import dense, in_fp8, mixture, with_quantised_activations, write_unscaled
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import COMMON, WORDS, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = {"r": 8, "lora_dropout": 0.0}


def train(model, folder, **options):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 120, (16,), generator=generator).tolist() for _ in range(8)]
    args = LigerTrainingArguments(output_dir=str(folder), **{**COMMON, "max_steps": 2, "bf16": False, **options})
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    trainer = LigerTrainer(model, args=args, train_dataset=data)
    trainer.train()
    return trainer


def moved(model, folder, **options):
    before = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    train(model, folder, **options)
    return {name: not torch.equal(value, before[name]) for name, value in model.named_parameters() if name in before}


def test_adapters_on_experts_in_fp8_are_refused(tmp_path, monkeypatch):
    model = get_peft_model(
        in_fp8(mixture(), monkeypatch), LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS, **LORA)
    )
    rows = [row for row in apply_liger_kernel(model).rows if "ParamWrapper" in row.target]
    assert rows
    assert all("adds the adapter to the codes" in row.reason and not row.applied for row in rows)
    with pytest.raises(ValueError, match=r"mlp\.experts.*float8_e4m3fn.*dequantize=True"):
        train(model, tmp_path)


def test_adapters_beside_experts_in_fp8_train(tmp_path, monkeypatch):
    model = get_peft_model(in_fp8(mixture(), monkeypatch), LoraConfig(target_modules=["q_proj", "v_proj"], **LORA))
    change = moved(model, tmp_path)
    assert len(change) == 8
    assert all(change.values())


@pytest.mark.parametrize("way", [True, "gaussian"])
def test_adapters_that_peft_rounded_to_fp8_start_again(way, tmp_path, monkeypatch, caplog):
    model = get_peft_model(
        in_fp8(dense(), monkeypatch), LoraConfig(target_modules="all-linear", init_lora_weights=way, **LORA)
    )
    a = {name: each for name, each in model.named_parameters() if "lora_A" in name}
    assert all(each.detach().unique().numel() < 200 for each in a.values())  # as PEFT makes them
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        check_low_bit_weights(model)
        check_low_bit_weights(model)
    assert sum("initialised again" in record.getMessage() for record in caplog.records) == 1
    assert all(each.unique().numel() > 0.9 * each.numel() for each in a.values())
    spread = {name: each.float().std() for name, each in a.items()}
    model = get_peft_model(dense(), LoraConfig(target_modules="all-linear", init_lora_weights=way, **LORA))
    expected = {name: each.float().std() for name, each in model.named_parameters() if "lora_A" in name}
    assert all(0.8 < spread[name] / expected[name] < 1.25 for name in expected)


def test_adapters_of_trl_on_fp8_start_with_all_their_values(tmp_path, monkeypatch):
    args = LigerSFTConfig(output_dir=str(tmp_path), **{**COMMON, "max_steps": 1, "bf16": False})
    trainer = LigerSFTTrainer(
        in_fp8(dense(), monkeypatch), args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"text": words} for words in WORDS]),
        peft_config=LoraConfig(target_modules="all-linear", **LORA),
    )  # fmt: skip
    a = [each for name, each in trainer.model.named_parameters() if "lora_A" in name]
    assert all(each.unique().numel() > 0.9 * each.numel() for each in a)
    trainer.train()


def test_adapters_that_were_trained_are_left(monkeypatch):
    model = get_peft_model(in_fp8(dense(), monkeypatch), LoraConfig(target_modules=["q_proj"], **LORA))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.fill_(0.5)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    check_low_bit_weights(model)
    assert all(
        torch.equal(each.view(torch.uint8), before[name].view(torch.uint8)) for name, each in model.named_parameters()
    )


def test_what_reads_or_trains_codes_is_refused(monkeypatch):
    base = in_fp8(dense(), monkeypatch)
    in_8_bits = get_peft_model(base, LoraConfig(target_modules=["q_proj"], **LORA), autocast_adapter_dtype=False)
    with pytest.raises(ValueError, match=r"trains '.*lora_A.*float8_e4m3fn.*autocast_adapter_dtype"):
        check_low_bit_weights(in_8_bits)
    base = in_fp8(dense(), monkeypatch)
    base.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"trains 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        check_low_bit_weights(base)
    plain = get_peft_model(dense(), LoraConfig(target_modules=["q_proj"], use_dora=True, **LORA))
    check_low_bit_weights(plain)
    for module in plain.modules():
        if hasattr(module, "base_layer"):
            codes = module.base_layer.weight.detach().to(torch.float8_e4m3fn)
            module.base_layer.weight = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(ValueError, match=r"'default'.*q_proj.*DoRA"):
        check_low_bit_weights(plain)


class PackedExperts(nn.Module):
    """As a library keeps experts in 4 bits: blocks that are parameters, or an object of its own."""

    def __init__(self, swizzled):
        super().__init__()
        if swizzled:
            self.gate_up_proj = object()
        else:
            codes = torch.zeros(4, 64, 2, 16, dtype=torch.uint8)
            self.gate_up_proj_blocks = nn.Parameter(codes, requires_grad=False)

    def forward(self, hidden, *args):
        return hidden


@pytest.mark.parametrize("swizzled", [False, True])
def test_packed_experts_that_peft_skips_are_refused(swizzled):
    def adapted(targets):
        model = mixture()
        for layer in model.model.layers:
            layer.mlp.experts = PackedExperts(swizzled)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=targets, **LORA))

    with pytest.raises(ValueError, match=r"'experts\.gate_up_proj'.*packed.*no adapter"):
        check_low_bit_weights(adapted(EXPERTS[:1]))
    check_low_bit_weights(adapted(["shared_expert.gate_up_proj"]))  # there is none, packed or not: PEFT warns itself


@pytest.mark.parametrize("way", ["forward", "class"])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]])
def test_layers_that_cut_gradients_are_refused(way, targets, tmp_path):
    model = get_peft_model(with_quantised_activations(dense(), way), LoraConfig(target_modules=targets, **LORA))
    rows = [row for row in apply_liger_kernel(model).rows if row.component == "lora"]
    assert rows
    assert not any(row.applied for row in rows)  # PEFT's forward runs, and the report says so
    with pytest.raises(ValueError, match=r"no gradient to its input \(.*dequantize=True"):
        train(model, tmp_path)


def test_a_whole_model_whose_layers_cut_gradients_is_refused(tmp_path):
    model = with_quantised_activations(dense(), "forward")
    for layer in model.model.layers:  # gradients of their weights alone do not show it
        layer.mlp.up_proj.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="no gradient to its input"):
        train(model, tmp_path)


class Cutting(nn.Linear):
    """A layer in 8 bits that computes without gradients, as some libraries' do."""

    def __init__(self, plain, cuts=True):
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.cuts = cuts
        scale = plain.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((plain.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("weight_scale", scale)

    def forward(self, x):
        with torch.no_grad() if self.cuts else contextlib.nullcontext():
            return x @ (self.weight.to(x.dtype) * self.weight_scale.to(x.dtype)).t()


class Lifted(nn.Module):
    """An embedding and a frozen projection of it, as of factorised embeddings."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.projection = embedding, Cutting(nn.Linear(128, 128, bias=False))

    def forward(self, ids):
        return self.projection(self.embedding(ids))


def lifted(trains_embedding=False):
    """A model whose layers train behind a frozen layer that cuts gradients."""
    model = dense().float()
    model.model.embed_tokens = Lifted(model.model.embed_tokens)
    model.model.embed_tokens.embedding.requires_grad_(trains_embedding)
    return model


CHECKPOINTS = {
    "none": {"gradient_checkpointing": False},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_layer_that_cuts_no_gradient_of_anything_trained(adapted, checkpoints, tmp_path):
    model = lifted()
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], **LORA))
    change = moved(model, tmp_path, **CHECKPOINTS[checkpoints])
    assert change
    assert all(change.values())


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_a_layer_that_cuts_the_gradient_of_embeddings(checkpoints, tmp_path):
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.projection' passes no gradient"):
        train(lifted(trains_embedding=True), tmp_path, **CHECKPOINTS[checkpoints])


def mixed(cutting):
    """Adapters on the last layer, behind layers of one class, of which that of the number `cutting` cuts gradients."""
    model = dense().float()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.down_proj = Cutting(layer.mlp.down_proj, number == cutting)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], layers_to_transform=[1], **LORA))


def test_layers_of_one_class_may_cut_gradients_or_not(tmp_path):
    assert all(moved(mixed(0), tmp_path).values())
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj' passes no gradient"):
        train(mixed(1), tmp_path)


def test_adapters_on_the_first_layer_alone_have_nothing_in_front(tmp_path):
    model = dense().float()
    first = model.model.layers[0].self_attn
    first.v_proj = Cutting(first.v_proj)
    model.requires_grad_(False)
    adapted = get_peft_model(model, LoraConfig(target_modules=["mlp.down_proj"], **LORA))
    assert all(moved(adapted, tmp_path).values())


def test_what_is_behind_a_reentrant_checkpoint_is_not_known(tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    model = dense().float().requires_grad_(False)
    first = model.model.layers[0].self_attn
    first.v_proj = Cutting(first.v_proj)
    model.model.embed_tokens.requires_grad_(True)
    with pytest.raises(ValueError, match=r"passes no gradient.*'use_reentrant': False"):
        train(model, tmp_path, **options)


UNKNOWN = {
    "modelopt": (torch.float8_e4m3fn, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nothing said": (torch.float8_e4m3fn, None),
    "e5m2": (torch.float8_e5m2, None),
    "int8": (torch.int8, {"quant_method": "of_a_vendor"}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_codes_that_were_loaded_as_weights_are_refused(name, tmp_path):
    dtype, quantization = UNKNOWN[name]
    write_unscaled(tmp_path / "base", dtype, quantization)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    assert set(unscaled_weights(model)) == {name for name, _ in model.named_parameters() if "_proj" in name}
    assert "scales were not loaded" in str(apply_liger_kernel(model))
    method = repr(quantization["quant_method"]) if quantization else "14 weights"
    with pytest.raises(ValueError, match=rf"'model\.layers\.0.*scales were not loaded.*|{method}") as error:
        train(get_peft_model(model, LoraConfig(target_modules=["q_proj"], **LORA)), tmp_path)
    assert method in str(error.value)
    assert ("`packed_base: auto` reads it" in str(error.value)) == (name == "modelopt")


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
def test_no_weight_of_a_model_is_taken_for_codes(family):
    model = TINY_MODELS[family]()
    for scale in (1.0, 2.0**-7, 300.0):
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(scale)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert unscaled_weights(model.to(dtype)) == []


def test_weights_of_few_numbers_are_no_codes():
    table = torch.zeros(64, 64)
    table[:, 0] = 100.0
    assert unscaled_weights(nn.ParameterList([table, torch.full((64, 64), 64.0), torch.eye(64) * 32])) == []


class Unused(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 4)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_trained_parameters_without_a_gradient_are_named_once(caplog):
    model = Unused(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))
    with caplog.at_level(logging.WARNING, "liger_trainer"), first_gradients_checked(model):
        model.inner[1](torch.ones(2, 4)).sum().backward()
    (record,) = caplog.records
    assert "2 of 8" in record.getMessage()  # the other layers of the list are reached by other inputs, as experts are
    assert "'head.weight'" in record.getMessage()


class Codes(torch.Tensor):
    """As torchao keeps weights: it knows its linear product, and not what an optimizer or a norm would do with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight = args[:2]
            return x @ weight.as_subclass(torch.Tensor).t()
        if function in (torch._foreach_norm, torch._foreach_abs, torch.linalg.vector_norm, torch.isfinite):
            raise NotImplementedError(f"Codes dispatch: {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_of_a_subclass_train_with_adapters_on_other_layers(tmp_path):
    model = dense().requires_grad_(False)
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight.detach().as_subclass(Codes)
        layer.mlp.down_proj.weight = nn.Parameter(weight, requires_grad=False)
        assert type(layer.mlp.down_proj.weight.detach()) is Codes
    change = moved(get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], **LORA)), tmp_path)
    assert len(change) == 8
    assert all(change.values())
