"""Parameters counted on the meta device are those of the built model."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from liger_trainer import load_packed
from liger_trainer.configs.liger_adamw import liger_adamw_options
from liger_trainer.optim import LigerAdamW
from liger_trainer.packed.formats import bytes_of_weights
from liger_trainer.plan.parameters import NF4_BYTES, count_parameters
from liger_trainer.plan.splitting import optimizer_memory
from liger_trainer.plan.work import read_layer_shape
from tests.low_bit import write_mxfp4
from tests.packed_checkpoints import write_dense, write_mixture
from tests.plan.cases import counted
from tests.quantised import library, quantise

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def build(config, lora=None, dtype=torch.bfloat16):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model if lora is None else get_peft_model(model, lora)


@pytest.mark.parametrize("tied", [False, True])
def test_counts_and_bytes(tied):
    model = build(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    counts = count_parameters(model)
    assert counts.total.elements == sum(parameter.numel() for parameter in model.parameters())
    assert counts.total.bytes == 2 * counts.total.elements == counts.total.trained_bytes
    assert counts.groups["embedding"].elements == 96 * 32
    assert counts.groups["head"].elements == (0 if tied else 96 * 32)
    assert counts.tied is tied
    assert counts.head_trained
    assert counts.layer.elements * 2 == counts.groups["layers"].elements
    assert counts.groups["other"].elements == 32  # the final norm
    assert all(parameter.is_meta for parameter in model.parameters())


def test_experts_are_counted_apart():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = build(Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 3}, **sizes))
    counts, shape = count_parameters(model), read_layer_shape(model)
    assert counts.groups["experts"].elements == 3 * 4 * 3 * 32 * 24
    assert (shape.experts_per_token, shape.expert_intermediate, shape.intermediate) == (2, 24, 0)


def test_adapters_are_fp32_and_all_that_is_trained():
    counts, shape = counted("llama3-8b", rank=16)
    assert counts.groups["adapters"].trained == counts.total.trained == 16 * 32 * 81920  # r, layers, in + out
    assert counts.total.trained_bytes == 4 * counts.total.trained
    assert not shape.trained
    assert not counts.head_trained
    widths = (shape.adapted_attention, shape.adapted_output, shape.adapted_mlp, shape.adapted_down)
    assert widths == (3 * 4096, 4096, 2 * 4096, 14336)


def test_saved_head_is_trained():
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    counts = count_parameters(build(LlamaConfig(**SIZES), lora))
    assert counts.head_trained
    assert counts.total.trained == 96 * 32 + 2 * 4 * (32 + 32)


@pytest.mark.parametrize(
    ("bits", "nested", "width"), [(4, False, 0.5625), (4, True, 0.5 + 1 / 64 + 4 / 64 / 256), (8, False, 1.0)]
)
def test_quantised_layers(bits, nested, width):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = build(LlamaConfig(**SIZES), lora)
    plain, quantised = count_parameters(model), count_parameters(model, bits, nested)
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert plain.total.bytes - quantised.total.bytes == linear * (2 - width)
    assert quantised.total.trained_bytes == plain.total.trained_bytes
    assert (plain.dequantised, quantised.dequantised) == (0, 32 * 64 if bits == 4 else 0)


def test_a_base_in_fp8_is_that_of_the_decoder():
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = build(LlamaConfig(**SIZES), lora)
    model.base_model.model.tower = torch.nn.Linear(64, 64, device="meta", dtype=torch.bfloat16)  # as of a vision model
    plain, stored = count_parameters(model), count_parameters(model, fp8_base=True)
    assert plain.total.bytes - stored.total.bytes == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert stored.total.trained_bytes == plain.total.trained_bytes
    assert stored.layer.bytes < plain.layer.bytes
    assert stored.dequantised == 0


@pytest.mark.parametrize("name", ["fp8 blocks", "mxfp8", "nvfp4", "int4", "gptq", "awq"])
def test_a_packed_base_takes_as_many_bytes_as_counted(name, tmp_path):
    write_dense(tmp_path, name)
    packed = load_packed(str(tmp_path), dtype="auto")
    total = sum(each.nbytes for key, each in packed.named_parameters() if not key.endswith(("weight_shape", "g_idx")))
    config, plain = packed.config, LlamaForCausalLM(packed.config).to(torch.bfloat16)
    widths = bytes_of_weights(config.quantization_config.to_dict())
    counts = count_parameters(plain, packed=widths)
    assert total == pytest.approx(counts.total.bytes, rel=0.01)
    assert counts.dequantised == 192 * 128
    multiplied = count_parameters(plain, packed=widths, fp8_base=True)
    assert multiplied.total == counts.total
    assert multiplied.dequantised == (0 if name == "fp8 blocks" else 192 * 128)
    assert counts.layer.bytes < 0.7 * count_parameters(plain).layer.bytes


def test_packed_experts_take_as_many_bytes_as_counted(tmp_path):
    write_mxfp4(tmp_path)
    packed = load_packed(str(tmp_path), dtype="auto")
    plain = type(packed)(packed.config).to(torch.bfloat16)
    counts = count_parameters(plain, packed=bytes_of_weights({"quant_method": "mxfp4"}))
    marks = ("gate_up_proj", "down_proj")  # of one element, in the place of a weight
    assert sum(each.nbytes for key, each in packed.named_parameters() if not key.endswith(marks)) == counts.total.bytes
    assert counts.dequantised == 4 * 64 * 192 + 4 * 96 * 64


@pytest.mark.parametrize("name", ["fp8 blocks", "nvfp4", "int4", "gptq", "awq"])
def test_a_packed_mixture_takes_as_many_bytes_as_counted(name, tmp_path):
    write_mixture(tmp_path, name)
    packed = load_packed(str(tmp_path), dtype="auto")
    total = sum(each.nbytes for key, each in packed.named_parameters() if not key.endswith(("weight_shape", "g_idx")))
    plain = type(packed)(packed.config).to(torch.bfloat16)
    counts = count_parameters(plain, packed=bytes_of_weights(packed.config.quantization_config.to_dict()))
    assert total == pytest.approx(counts.total.bytes, rel=0.01)
    assert counts.dequantised == 4 * 256 * 128 + 4 * 128 * 128


@pytest.mark.parametrize(
    ("left", "experts"),
    [
        (None, True),
        (["lm_head"], True),
        (["mlp.gate"], True),
        (["model.layers.0.mlp"], True),  # of one layer
        (["mlp", "lm_head"], False),
        (["model.layers.mlp.experts"], False),
    ],
)
def test_experts_that_a_checkpoint_leaves_in_16_bits_are_not_counted_as_packed(left, experts):
    width = bytes_of_weights({"quant_method": "gptq", "group_size": -1, "modules_to_not_convert": left})
    assert width("model.layers.1.mlp.experts.gate_up_proj", True) == (0.5 if experts else None)


def _group(*targets, bits=8, **more):
    kind = {"num_bits": bits, "type": "int" if bits == 4 else "float", **more}
    return {"targets": [*targets], "weights": kind, "format": "pack-quantized" if bits == 4 else "float-quantized"}


ATTENTION, MLP, STACK = "layers.3.self_attn.q_proj", "layers.3.mlp.up_proj", "layers.3.mlp.experts.gate_up_proj"
LEFT = {
    "names": ({"modules_to_not_convert": ["self_attn"]}, {ATTENTION: None, MLP: 1.0, STACK: 1.0}),
    "every name": ({"ignore": [f"model.layers.{i}.self_attn.q_proj" for i in range(8)]}, {ATTENTION: None, MLP: 1.0}),
    "a longer name": ({"ignore": ["model.layers.3.self_attn.q"]}, {ATTENTION: 1.0}),
    "names of AutoFP8": ({"ignored_layers": ["model.layers.3.mlp.up_proj"]}, {ATTENTION: 1.0, MLP: None}),
    "names of ModelOpt": ({"quantization": {"exclude_modules": ["*mlp*"]}}, {ATTENTION: 1.0, MLP: None}),
    "another layer": ({"ignore": ["model.layers.30", "model.layers.1"]}, {ATTENTION: 1.0, MLP: 1.0}),
    "patterns": ({"ignore": ["model.layers.*.self_attn*"]}, {ATTENTION: None, MLP: 1.0, STACK: 1.0}),
    "expressions": ({"ignore": ["re:.*mlp.*"]}, {ATTENTION: 1.0, MLP: None, STACK: None}),
    "experts": ({"ignore": ["re:.*experts.*down_proj"]}, {STACK: 1.0, "layers.3.mlp.experts.down_proj": None}),
    "GPTQ": ({"dynamic": {"-:.*self_attn": {}, "+:.*mlp": {}}}, {ATTENTION: None, MLP: 1.0}),
    "targets": ({"config_groups": {"a": _group("re:.*experts.*")}}, {ATTENTION: None, MLP: None, STACK: 1.0}),
    "groups": (
        {"config_groups": {"a": _group("Linear"), "b": _group("re:.*mlp.*", bits=4, group_size=32)}},
        {ATTENTION: 1.0, MLP: 0.5625, STACK: 0.5625},
    ),
}


@pytest.mark.parametrize("around", ["model", "model.language_model"])
@pytest.mark.parametrize("name", LEFT)
def test_what_a_configuration_leaves_in_16_bits(name, around):
    settings, expected = LEFT[name]
    width = bytes_of_weights({"quant_method": "compressed-tensors", "format": "float-quantized", **settings})
    assert {key: width(f"{around}.{key}", "experts" in key) for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "mxfp8"}, 1 + 1 / 32),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 1 + 1 / 32),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, 1 + 1 / 32),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, 0.5 + 1 / 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
    ],
)
def test_scales_of_groups_are_counted_by_each_name_of_a_format(settings, expected):
    assert bytes_of_weights(settings)(MLP, False) == expected


def test_layers_that_stay_in_16_bits_are_counted_so():
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    plain, adapted = (build(LlamaConfig(**SIZES), adapters) for adapters in (None, lora))
    weights = sum(each.numel() for key, each in plain.named_parameters() if "mlp" in key and each.dim() == 2)
    for model in (plain, adapted):
        packed = count_parameters(model, packed=bytes_of_weights(settings)).total.bytes
        assert count_parameters(model).total.bytes - packed == weights


def test_bitsandbytes_takes_as_many_bytes_as_counted():
    library()
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}))
    model = model.to(torch.bfloat16)
    expected = count_parameters(model, 4, nested=True).total.bytes
    total = sum(parameter.nbytes for parameter in quantise(model).parameters())
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            total += state.absmax.nbytes + state.state2.absmax.nbytes
    assert total == pytest.approx(expected, rel=1e-3)


def test_experts_are_quantised_to_4_bits_and_heads_never_are():
    model = build(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    plain, four, eight = count_parameters(model), count_parameters(model, 4), count_parameters(model, 8)
    for kind in ("head", "embedding"):
        assert four.groups[kind] == eight.groups[kind] == plain.groups[kind]
    assert eight.groups["experts"] == plain.groups["experts"]
    assert four.groups["experts"].bytes == NF4_BYTES * plain.groups["experts"].elements
    assert four.dequantised == four.groups["experts"].elements / four.layers  # both projections of a layer at once
    assert four.groups["layers"].bytes < 0.5 * plain.groups["layers"].bytes


def test_no_layers_is_an_error():
    with pytest.raises(ValueError, match="no list of layers"):
        count_parameters(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("optim", "bytes_each"),
    [
        ("adamw_torch_fused", 4),  # two states in the bf16 of the weights
        ("adamw_bnb_8bit", 2),
        ("paged_adamw_8bit", 2),
        ("paged_adamw_32bit", 8),
        ("sgd", 0),
        ("a_new_one", 8),
    ],
)
def test_optimizer_states(optim, bytes_each):
    counts = count_parameters(build(LlamaConfig(**SIZES)))
    assert optimizer_memory(optim, counts).states == bytes_each * counts.total.elements


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adafactor", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_those_of_the_real_optimizer(name, dtype):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=dtype)
    counts = count_parameters(model)
    if name == "adafactor":
        from transformers import Adafactor

        optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    else:
        kind = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    real = sum(value.nbytes for value in states if value.dim())
    assert optimizer_memory(name, counts).states == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=16, target_modules=["q_proj"], task_type="CAUSAL_LM")])
@pytest.mark.parametrize(
    "optim_args", ["", "states=bf16", "states=fp32", "master=stochastic", "states=bf16, master=none"]
)
def test_states_of_liger_adamw(optim_args, lora):
    """Of matrices with and without whole blocks of 256 columns, of norms, and of fp32 adapters."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 300}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    model = model if lora is None else get_peft_model(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = LigerAdamW(trained, **liger_adamw_options(SimpleNamespace(optim_args=optim_args, seed=0)))
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    real = sum(value.nbytes for state in optimizer.state.values() for key, value in state.items() if key != "step")
    counts = count_parameters(model)
    assert optimizer_memory("liger_adamw", counts, optim_args=optim_args).states == real
    upcast = optimizer_memory("liger_adamw", counts, 4.0 * counts.total.trained, optim_args).states
    assert upcast == 8 * counts.total.trained, "as torch's, where FSDP2 has made the weights fp32"
