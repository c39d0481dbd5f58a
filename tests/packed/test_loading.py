"""Checkpoints in 8 bits and fewer stay packed as they are loaded, mean what they mean, and are saved as they were."""

from __future__ import annotations

import copy
import itertools
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)
from transformers.quantizers import auto

from liger_trainer import load_packed
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.packed.experts import packed_stacks
from liger_trainer.packed.formats import group_of_columns, packed_matrix, reason_against
from liger_trainer.packed.loading import (
    PackedQuantizer,
    dequantise,
    is_packed,
    method_of,
    packed_loading,
    quantization_of,
    stackable,
)
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.packed.published import Stack, Tensor
from liger_trainer.recipe.model import published_form
from tests import low_bit
from tests.packed_checkpoints import (
    FORMATS,
    add_scales_of_caches,
    fp8_blocks,
    write,
    write_dense,
    write_latent_mixture,
    write_mixture,
    write_nested,
)

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(3, 35).view(2, 16)
LAYER, EXPERT, STACKS = (
    "model.layers.1.mlp.up_proj",
    "model.layers.1.mlp.experts.2.up_proj",
    "model.layers.1.mlp.experts",
)


def packed_layers(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, PackedLinear)}


def write_rows(folder):
    """A dense model in FP8 with keys and values in 16 bits; its class."""
    write_dense(folder, "fp8 rows")
    change(folder, in_16_bits)
    return LlamaForCausalLM


def in_16_bits(tensors, settings):
    for name in [name for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        del tensors[f"{name}_scale"], tensors[name.replace("weight", "input_scale")]
        tensors[name] = tensors[name].to(torch.bfloat16)
    settings["ignore"] = ["lm_head", "re:.*[kv]_proj"]


def dequantised(model, meant):
    """A plain model of the class of `model`, in its dtype, with the weights that its checkpoint means."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    return type(model).from_pretrained(None, config=config, state_dict=dict(meant), dtype=model.dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_means_what_it_means(name, tmp_path):
    meant = write_dense(tmp_path, name)
    model = load_packed(str(tmp_path), dtype="auto")
    layers = packed_layers(model)
    assert len(layers) == 14
    for path, layer in layers.items():
        assert torch.equal(layer.decoded(torch.bfloat16), meant[f"{path}.weight"].to(torch.bfloat16)), path
        torch.testing.assert_close(layer.decoded(torch.float32), meant[f"{path}.weight"], rtol=1e-6, atol=0)
        assert (layer.weight.shape, layer.weight.dtype) == ((layer.out_features, layer.in_features), torch.float32)
        assert not any(each.requires_grad for each in layer.parameters())
    assert torch.equal(model(IDS).logits, dequantised(model, meant)(IDS).logits)
    wide = load_packed(str(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(wide(IDS).logits, dequantised(wide, meant)(IDS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_saved_as_it_was_published(name, tmp_path):
    write_dense(tmp_path / "published", name)
    model = load_packed(str(tmp_path / "published"), dtype="auto")
    model.save_pretrained(tmp_path / "saved")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("published", "saved"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype, key
        assert after[key].shape == tensor.shape, key
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
    settings = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("published", "saved")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    again = load_packed(str(tmp_path / "saved"), dtype="auto")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("write_model", "text"), [(write_rows, "model"), (write_nested, "model.language_model")])
def test_scales_of_a_cache_are_saved_as_they_were_published(write_model, text, tmp_path):
    kind = write_model(tmp_path / "published")
    names = add_scales_of_caches(tmp_path / "published", text)
    load_packed(str(tmp_path / "published"), kind, dtype="auto").save_pretrained(tmp_path / "saved")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("published", "saved"))
    assert {name for name in after if "self_attn" in name and name.endswith(("k_scale", "v_scale"))} == {*names}
    assert all(torch.equal(after[name], before[name]) for name in names)


def test_a_state_dict_is_loaded_again(tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    model = load_packed(str(tmp_path), dtype="auto")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = copy.deepcopy(model)
    for layer in packed_layers(other).values():
        layer.codes.zero_()
        layer.scales.fill_(60)
    assert not torch.equal(other(IDS).logits, model(IDS).logits)
    other.load_state_dict(state)
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_casts_of_the_model_change_neither_codes_nor_scales(tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    model = load_packed(str(tmp_path), dtype="auto")
    weights = {name: layer.decoded(torch.float32) for name, layer in packed_layers(model).items()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model.to(dtype)
        assert model.model.norm.weight.dtype == dtype
        for name, layer in packed_layers(model).items():
            assert torch.equal(layer.decoded(torch.float32), weights[name])
        assert model(IDS).logits.dtype == dtype


def test_a_plain_layer_gives_the_gradient_of_its_input_and_keeps_no_weight(tmp_path):
    meant = write_dense(tmp_path, "fp8 blocks")
    layer = load_packed(str(tmp_path), dtype=torch.float32).model.layers[0].mlp.up_proj
    weight = meant["model.layers.0.mlp.up_proj.weight"]
    x = torch.randn(3, 5, 128, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    # Besides the input, which others save too, the module's own tensors.
    own = {x.data_ptr(), *(each.data_ptr() for each in layer.parameters())}
    assert all(tensor.data_ptr() in own for tensor in kept if tensor.numel())
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(y, x.detach() @ weight.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, dy @ weight, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


MIXTURES = {
    "fp8 blocks": (lambda folder: write_mixture(folder), FineGrainedFP8Config, 8),
    "fp8 rows": (lambda folder: write_mixture(folder, "fp8 rows"), None, 8),
    "nvfp4": (lambda folder: write_mixture(folder, "nvfp4"), None, 8),
    "int4": (lambda folder: write_mixture(folder, "int4"), None, 8),
    "int4 with zeros": (lambda folder: write_mixture(folder, "int4 with zeros"), None, 8),
    "gptq": (lambda folder: write_mixture(folder, "gptq"), None, 8),
    "gptq v2": (lambda folder: write_mixture(folder, "gptq v2"), None, 8),
    "awq": (lambda folder: write_mixture(folder, "awq"), None, 8),
    "latent attention": (write_latent_mixture, None, 16),
    "mxfp4": (lambda folder: low_bit.write_mxfp4(folder), Mxfp4Config, 0),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_stay_packed(name, implementation, tmp_path):
    make, config, linears = MIXTURES[name]
    meant = make(tmp_path)
    model = load_packed(str(tmp_path), dtype="auto", experts_implementation=implementation)
    if config is None:
        plain = dequantised(model, meant)
        plain.set_experts_implementation(implementation)
    else:
        plain = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype="auto", experts_implementation=implementation,
            quantization_config=config(dequantize=True),
        )  # fmt: skip
    assert len(packed_layers(model)) == linears
    experts = model.model.layers[-1].mlp.experts
    stacks = packed_stacks(experts)
    for leaf, stack in stacks.items():
        expected = plain.model.layers[-1].mlp.experts.get_parameter(leaf)
        assert torch.equal(stack.decoded(), expected)
        assert (getattr(experts, leaf).shape, getattr(experts, leaf).dtype) == (expected.shape, expected.dtype)
        with pytest.raises(RuntimeError, match=f"^`{leaf}` of packed experts is held as codes"):
            getattr(experts, leaf) @ torch.ones(1)
    assert {*stacks} == {"gate_up_proj", "down_proj"}
    own = [key for key, _ in experts.named_parameters(recurse=False)]
    declared = [key for key, _ in plain.model.layers[-1].mlp.experts.named_parameters(recurse=False)]
    assert own[: len(declared)] == declared  # PEFT names adapters by this order
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert sum(each.numel() * each.element_size() for each in experts.parameters()) < 0.6 * sum(
        each.numel() * each.element_size() for each in plain.model.layers[-1].mlp.experts.parameters()
    )
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("name", ["gptq", "gptq v2", "awq"])
def test_experts_are_decoded_as_linear_layers_of_their_own_tensors(name, tmp_path):
    write_mixture(tmp_path, name)
    model = load_packed(str(tmp_path), dtype="auto")
    tensors, settings = load_file(tmp_path / "model.safetensors"), model.config.quantization_config.to_dict()

    def own(path, dtype):
        """The weight of a matrix of 128 x 128."""
        matrix = {key.rpartition(".")[2]: each for key, each in tensors.items() if key.startswith(f"{path}.")}
        return decode(packed_matrix(matrix, (128, 128), settings)[0], dtype)

    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        stacks = packed_stacks(model.get_submodule(path))
        for dtype in (torch.bfloat16, torch.float32):
            gate_up, down = (stacks[leaf].decoded(dtype) for leaf in ("gate_up_proj", "down_proj"))
            for expert in range(4):
                for part, rows in {"gate": gate_up[expert, :128], "up": gate_up[expert, 128:]}.items():
                    assert torch.equal(rows, own(f"{path}.{expert}.{part}_proj", dtype))
                assert torch.equal(down[expert], own(f"{path}.{expert}.down_proj", dtype))
        held = {key for key, _ in model.get_submodule(path).named_parameters()}
        assert held == {*stacks, *(f"{leaf}_{part}" for leaf in stacks for part in ("codes", "scales", "zeros"))}


def test_groups_of_experts_in_order_need_not_be_named(tmp_path):
    write_mixture(tmp_path, "gptq")
    before = load_packed(str(tmp_path), dtype="auto")(IDS).logits
    change(tmp_path, lambda tensors, _: [tensors.pop(key) for key in [*tensors] if key.endswith("g_idx")])
    assert torch.equal(load_packed(str(tmp_path), dtype="auto")(IDS).logits, before)


def test_experts_follow_the_casts_of_the_model(tmp_path):
    write_mixture(tmp_path)
    model = load_packed(str(tmp_path), dtype="auto")
    experts = model.model.layers[0].mlp.experts
    before = packed_stacks(experts)["down_proj"].decoded(torch.float32)
    other = copy.deepcopy(model).to(torch.float32)
    assert other.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float32
    assert experts.gate_up_proj.dtype == torch.bfloat16
    assert torch.equal(packed_stacks(other.model.layers[0].mlp.experts)["down_proj"].decoded(), before)
    assert other(IDS).logits.dtype == torch.float32


@pytest.mark.parametrize("name", ["fp8 blocks", "nvfp4", "gptq", "mxfp4"])
def test_a_pickled_mixture_is_the_same(name, tmp_path):
    MIXTURES[name][0](tmp_path)
    model = load_packed(str(tmp_path), dtype="auto")
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    experts, others = (each.model.layers[-1].mlp.experts for each in (again, model))
    assert type(experts) is type(others)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_dequantised_model_was_never_packed(name, tmp_path):
    MIXTURES[name][0](tmp_path)
    model = load_packed(str(tmp_path), dtype="auto")
    before = model(IDS).logits
    names = [key for key, _ in type(model)(model.config).named_parameters()]
    dequantise(model)
    assert not is_packed(model)
    assert [key for key, _ in model.named_parameters()] == names
    assert torch.equal(model(IDS).logits, before)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert torch.equal(again(IDS).logits, before)


def test_other_models_load_as_always(tmp_path):
    before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    low_bit.dense().save_pretrained(tmp_path / "plain")
    write_dense(tmp_path / "packed", "fp8 blocks")
    with packed_loading():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        assert before[0] != auto.AUTO_QUANTIZER_MAPPING
    assert not is_packed(plain)
    assert before == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    assert not is_packed(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))  # on a CPU
    with pytest.raises(ValueError, match="holds no packed weights: its configuration names none of fp8"):
        load_packed(str(tmp_path / "plain"))
    with pytest.raises(ValueError, match="`quantization_config` is given"):
        load_packed(str(tmp_path / "packed"), quantization_config=FineGrainedFP8Config())


def test_a_checkpoint_whose_weights_were_all_left_in_16_bits(tmp_path):
    model = low_bit.dense()
    model.config.quantization_config = {"quant_method": "fp8", "modules_to_not_convert": ["layers", "lm_head"]}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its configuration names 'fp8', but its files hold every weight in "):
        load_packed(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "owner", "tensor"),
    [("fp8 blocks", LAYER, "weight_scale_inv"), ("mixture", f"{STACKS}.down_proj", "down_proj_scale_inv")],
)
def test_a_tensor_that_is_not_loaded_is_named(name, owner, tensor, tmp_path, monkeypatch):
    """As where a rule of transformers does not fit."""
    write_mixture(tmp_path) if name == "mixture" else write_dense(tmp_path, name)
    process = PackedQuantizer._process_model_after_weight_loading

    def without_one(self, model, **kwargs):
        path = owner if name != "mixture" else STACKS
        del vars(model.get_submodule(path).get_parameter(tensor))["_is_hf_initialized"]
        return process(self, model, **kwargs)

    monkeypatch.setattr(PackedQuantizer, "_process_model_after_weight_loading", without_one)
    with pytest.raises(ValueError, match=f"'{owner}' cannot stay packed: transformers has found no '{tensor}', or not"):
        load_packed(str(tmp_path), dtype="auto")


def test_settings_of_the_text_configuration_are_found(tmp_path):
    kind = write_nested(tmp_path / "packed")
    config = AutoConfig.from_pretrained(tmp_path / "packed")
    assert method_of(config) == "fp8"
    assert quantization_of(config) == config.text_config.quantization_config
    assert published_form(config) == "fp8"
    assert quantization_of(LlamaConfig()) is None
    model = load_packed(str(tmp_path / "packed"), kind, dtype="auto")
    assert len(packed_layers(model)) == 14
    before = model(IDS).logits
    dequantise(model).save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert torch.equal(kind.from_pretrained(tmp_path / "saved", dtype="auto")(IDS).logits, before)


def change(folder, alter):
    """Rewrites a checkpoint with `alter` of its tensors and of its configuration."""
    tensors = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    alter(tensors, settings["quantization_config"])
    write(folder, tensors, AutoConfig.for_model(**settings), settings["quantization_config"])


def in_8_bits(tensors, settings):
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        tensors[name] = tensors[name].view(torch.int8)


def of_other_blocks(tensors, settings):
    settings["weight_block_size"] = [64, 64]


def with_a_packed_head(tensors, settings):
    made, _ = fp8_blocks(128, 128)
    tensors |= {f"lm_head.{name}": tensor for name, tensor in made.items()}


REFUSED = {
    "int8": (in_8_bits, r"up_proj' cannot stay packed: its format is not known: weight in torch\.int8"),
    "blocks": (
        of_other_blocks,
        r"its scales are \(2, 1\), and blocks are \[64, 64\]; for a weight of \(192, 128\) they must be \(3, 2\) or ",
    ),
    "head": (with_a_packed_head, "'lm_head' cannot stay packed: it is the head"),
}


def with_transforms(tensors, settings):
    settings["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}


def sparse(tensors, settings):
    for leaf in ("weight", "weight_scale_inv"):
        del tensors[f"{LAYER}.{leaf}"]
    named = {"bitmask": torch.zeros(192, 16).byte(), "compressed": torch.ones(192, 64), "shape": torch.ones(2)}
    tensors |= {f"{LAYER}.{leaf}": tensor for leaf, tensor in named.items()}


def scaled_before(tensors, settings):
    tensors[f"{LAYER}.pre_quant_scale"] = torch.rand(128)


REFUSED |= {
    "transforms": (with_transforms, "`quantization_config` has a `transform_config`, and inputs of packed layers are "),
    "sparse": (sparse, r"up_proj' cannot stay packed: the checkpoint has 'bitmask', 'compressed', 'shape' in place of"),
    "scales of inputs": (scaled_before, r"up_proj' cannot stay packed: it also has 'pre_quant_scale', which is "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stay_packed_is_refused(name, tmp_path):
    alter, message = REFUSED[name]
    write_dense(tmp_path, "fp8 blocks")
    change(tmp_path, alter)
    with pytest.raises(ValueError, match=f"{message}.*Set `packed_base` to false"):
        load_packed(str(tmp_path), dtype="auto")


def with_orders(order):
    """What puts `order` of columns, a number for each of 128, beside the codes of INT4."""

    def alter(tensors, settings):
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            tensors[name.replace("packed", "g_idx")] = order[: tensors[name].shape[1] * 8].clone()

    return alter


NO_ORDER = {
    "none": torch.full((256,), -1, dtype=torch.int32),
    "consecutive": torch.arange(256, dtype=torch.int32) // 32,
}
"""Groups of columns that are in order: what compressed-tensors fills `weight_g_idx` with, and the order itself."""


@pytest.mark.parametrize("name", NO_ORDER)
def test_columns_without_an_order_of_their_own(name, tmp_path):
    write_dense(tmp_path / "published", "int4")
    before = load_packed(str(tmp_path / "published"), dtype="auto")(IDS).logits
    change(tmp_path / "published", with_orders(NO_ORDER[name]))
    model = load_packed(str(tmp_path / "published"), dtype="auto")
    assert torch.equal(model(IDS).logits, before)
    model.save_pretrained(tmp_path / "saved")
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("published", "saved"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", NO_ORDER)
def test_experts_without_an_order_of_their_own(name, tmp_path):
    write_mixture(tmp_path, "int4")
    before = load_packed(str(tmp_path), dtype="auto")(IDS).logits
    change(tmp_path, with_orders(NO_ORDER[name]))
    assert torch.equal(load_packed(str(tmp_path), dtype="auto")(IDS).logits, before)


def test_orders_of_columns_beside_other_formats_are_refused(tmp_path):
    write_dense(tmp_path, "nvfp4")
    change(tmp_path, with_orders(NO_ORDER["none"]))
    with pytest.raises(ValueError, match="it also has 'weight_g_idx', which is not supported"):
        load_packed(str(tmp_path), dtype="auto")


@pytest.mark.parametrize("named", [[128, 128], "128x128"])
def test_blocks_of_compressed_tensors(named, tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    before = load_packed(str(tmp_path), dtype="auto")(IDS).logits

    def renamed(tensors, settings):
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": named}
        settings.clear()
        settings.update(
            quant_method="compressed-tensors", format="float-quantized", ignore=["lm_head"],
            config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        )  # fmt: skip

    change(tmp_path, renamed)
    assert torch.equal(load_packed(str(tmp_path), dtype="auto")(IDS).logits, before)


def test_blocks_that_are_not_named_are_those_of_transformers(tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    before = load_packed(str(tmp_path), dtype="auto")(IDS).logits
    change(tmp_path, lambda _, settings: settings.pop("weight_block_size"))
    assert tuple(FineGrainedFP8Config().weight_block_size) == (128, 128)
    assert torch.equal(load_packed(str(tmp_path), dtype="auto")(IDS).logits, before)
    change(tmp_path, lambda _, settings: settings.update(weight_block_size=None))
    with pytest.raises(ValueError, match=r"its scales are \(\d, 1\), and blocks are not named; for a weight of"):
        load_packed(str(tmp_path), dtype="auto")


@pytest.mark.parametrize("named", ["128", [128], [128, 128, 1], "a x b", 128])
def test_blocks_of_other_dimensions_are_refused(named, tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    change(tmp_path, lambda _, settings: settings.update(weight_block_size=named))
    with pytest.raises(ValueError, match=r"its blocks are .*(128|a x b).*; they must be rows and columns, "):
        load_packed(str(tmp_path), dtype="auto")


def test_what_was_loaded_is_said_as_by_transformers(tmp_path):
    write_dense(tmp_path, "int4")
    model, info = load_packed(str(tmp_path), dtype="auto", output_loading_info=True)
    assert is_packed(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def of_two_groups(tensors, settings):
    """Layers of attention become those of NVFP4, whose group is named first."""
    for name in [name for name in tensors if name.endswith("weight_packed") and "self_attn" in name]:
        path, rows = name.removesuffix(".weight_packed"), len(tensors[name])
        without_all(path)(tensors, settings)
        tensors |= {f"{path}.{leaf}": tensor for leaf, tensor in FORMATS["nvfp4"][0](rows, 128)[0].items()}
    own = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}
    first = {"targets": ["re:.*self_attn.*"], "weights": own, "format": "nvfp4-pack-quantized"}
    settings.update(config_groups={"first": first, **settings["config_groups"]}, format="mixed-precision")


def test_each_layer_has_the_settings_of_its_own_group(tmp_path):
    write_dense(tmp_path, "int4")
    before = packed_layers(load_packed(str(tmp_path), dtype="auto"))
    change(tmp_path, of_two_groups)
    for path, layer in packed_layers(load_packed(str(tmp_path), dtype="auto")).items():
        if "mlp" in path:
            assert torch.equal(layer.decoded(torch.float32), before[path].decoded(torch.float32))
        else:
            assert layer.format == "packed FP4"

    def zeros_lost(tensors, settings):
        settings["config_groups"]["group_0"]["weights"]["symmetric"] = False

    change(tmp_path, zeros_lost)
    with pytest.raises(ValueError, match=r"mlp\.\w+' .* no 'weight_zero_point', and its configuration says"):
        load_packed(str(tmp_path), dtype="auto")


OF_DOWN = {
    "fp8 rows": ({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
    "nvfp4": ({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4-pack-quantized"),
    "int4 with zeros": ({"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}, "pack-quantized"),
}


@pytest.mark.parametrize(("form", "other"), [(one, other) for one in OF_DOWN for other in OF_DOWN if one != other])
def test_stacks_of_one_module_may_be_in_different_formats(form, other, tmp_path):
    meant = write_mixture(tmp_path, form)

    def down_in_another(tensors, settings):
        for layer, expert in itertools.product(range(2), range(4)):
            stack = f"model.layers.{layer}.mlp.experts"
            without_all(f"{stack}.{expert}.down_proj")(tensors, settings)
            made, meant[f"{stack}.down_proj"][expert] = FORMATS[other][0](128, 128)
            tensors |= {f"{stack}.{expert}.down_proj.{leaf}": tensor for leaf, tensor in made.items()}
        weights, named = OF_DOWN[other]
        down = {"targets": ["re:.*down_proj"], "weights": weights, "format": named}
        first = {**settings["config_groups"]["group_0"], "format": settings["format"]}
        settings.update(config_groups={"down": down, "group_0": first}, format="mixed-precision")

    change(tmp_path, down_in_another)
    model = load_packed(str(tmp_path), dtype=torch.float32)
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        for leaf, stack in packed_stacks(model.get_submodule(path)).items():
            torch.testing.assert_close(stack.decoded(), meant[f"{path}.{leaf}"].float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(model(IDS).logits, dequantised(model, meant)(IDS).logits, rtol=1e-5, atol=1e-6)


def test_of_sizes_of_groups_one_that_fits_is_taken():
    groups = {name: {"weights": {"group_size": size}} for name, size in (("a", 16), ("b", None), ("c", 128))}
    assert group_of_columns(192, 2, {"config_groups": groups}) == 128
    assert group_of_columns(192, 12, {"config_groups": groups}) == 16
    assert group_of_columns(192, 1, {"config_groups": groups}) == -1
    assert group_of_columns(192, 6, {}) == 32


def test_settings_of_transforms_may_be_empty(tmp_path):
    write_dense(tmp_path, "int4")
    change(tmp_path, lambda _, settings: settings.update(transform_config={"config_groups": {}}))
    assert is_packed(load_packed(str(tmp_path), dtype="auto"))


def test_layers_that_are_left_in_16_bits_may_be_missing(tmp_path):
    """They are initialised, as transformers does, and says."""
    write_dense(tmp_path, "fp8 blocks")
    change(tmp_path, lambda tensors, settings: settings["modules_to_not_convert"].append("mlp.up_proj"))
    change(tmp_path, without_all(LAYER))
    assert len(packed_layers(load_packed(str(tmp_path), dtype="auto"))) == 13


def test_layers_that_autofp8_leaves_in_16_bits_may_be_missing(tmp_path):
    """vLLM reads them by this name."""
    write_dense(tmp_path, "fp8 tensor")

    def without(tensors, settings):
        settings["ignored_layers"] = [*settings.pop("modules_to_not_convert"), LAYER]
        for name in [name for name in tensors if name.startswith(LAYER)]:
            del tensors[name]

    change(tmp_path, without)
    assert len(packed_layers(load_packed(str(tmp_path), dtype="auto"))) == 13


def test_a_new_head_is_not_missing(tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    assert is_packed(load_packed(str(tmp_path), AutoModelForSequenceClassification, dtype="auto"))


def test_gate_and_up_that_share_a_block_are_refused(tmp_path):
    write_mixture(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"]["weight_block_size"] = [192, 128]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="gate and up of an expert have 128 rows each, which blocks of 192 do not"):
        load_packed(str(tmp_path), dtype="auto")


def as_scalars(tensors, settings):
    for name in [name for name in tensors if name.endswith("weight_global_scale")]:
        tensors[name] = tensors[name].view(())


def in_an_order_of_their_own(tensors, settings):
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        tensors[name.replace("packed", "g_idx")] = (torch.arange(128, dtype=torch.int32) // 32).flip(0)


def of_one_scale(tensors, settings):
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name][:1]


def of_one_expert(tensors, settings):
    name = "model.layers.1.mlp.experts.3.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)


def with_a_scale_before(tensors, settings):
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        tensors[name.replace("weight_packed", "pre_quant_scale")] = torch.rand(128)


UNSTACKED = {
    "scales of inputs": ("int4", with_a_scale_before, "it also has 'pre_quant_scale', which is not supported, and"),
    "scalars": ("nvfp4", as_scalars, "its experts have one 'weight_global_scale' each, a scalar, which is not stacked"),
    "order": ("int4", in_an_order_of_their_own, r"its experts have columns in an order of their own .`weight_g_idx`"),
    "scale": ("fp8 rows", of_one_scale, "its experts have one scale each; stacked experts need one for each"),
    "order of gptq": (
        "gptq shuffled",
        lambda tensors, settings: None,
        r"its experts have columns in an order of their own .`g_idx`",
    ),
    "order of one": ("gptq", of_one_expert, r"its experts have columns in an order of their own .`g_idx`"),
    "bits": ("awq", lambda tensors, settings: settings.update(bits=8), r"its format is awq gemm in 8 bits; only GPTQ"),
    "groups": ("gptq", lambda tensors, settings: settings.update(group_size=64), r".*scales` is \(4, 128\) of "),
}


@pytest.mark.parametrize("name", UNSTACKED)
def test_experts_that_cannot_be_stacked_are_refused(name, tmp_path):
    form, alter, message = UNSTACKED[name]
    write_mixture(tmp_path, form)
    change(tmp_path, alter)
    with pytest.raises(ValueError, match=rf"experts\.\w+' cannot stay packed: {message}.*Set `packed_base` to false"):
        load_packed(str(tmp_path), dtype="auto")


def test_experts_whose_zeros_share_words_are_refused():
    matrix = {
        "weight_packed": Tensor(torch.int32, (36, 4)), "weight_scale": Tensor(torch.bfloat16, (36, 1)),
        "weight_zero_point": Tensor(torch.int32, (5, 1)),
    }  # fmt: skip
    stackable(Stack(matrix, 1, ("MergeModulelist",)), (36, 32), {})
    with pytest.raises(ValueError, match="gate and up of an expert have 36 rows each, whose zeros do not fill words"):
        stackable(Stack(matrix, 2, ("MergeModulelist", "Concatenate")), (36, 32), {})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "gptq", "bits": 8}, "its format is gptq in 8 bits; only GPTQ and AWQ .gemm. in 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "its format is gptq marlin in 4 bits"),
        ({"quant_method": "awq", "w_bit": 4, "version": "GEMV"}, "its format is awq gemv in 4 bits"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ"}}, "its format is modelopt W4A16_AWQ"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            "its weights are ints of 8 bits; floats of 8 and 4 bits and ints of 4",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": 1}}}, "a `transform_conf"),
    ],
)
def test_why_no_weight_can_stay_packed(settings, reason):
    assert re.search(reason, reason_against(settings))


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_against_what_is_loaded(name):
    assert reason_against(FORMATS[name][1]) is None


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_of_gptq_and_awq_whose_zeros_share_words_are_refused(method):
    codes = {"gptq": (4, 36), "awq": (32, 5)}[method]
    matrix = {
        "qweight": Tensor(torch.int32, codes), "qzeros": Tensor(torch.int32, (1, 5)),
        "scales": Tensor(torch.float16, (1, 36)),
    }  # fmt: skip
    settings = {"quant_method": method, "bits": 4, "group_size": 32}
    stackable(Stack(matrix, 1, ("MergeModulelist",)), (36, 32), settings)
    with pytest.raises(ValueError, match="gate and up of an expert have 36 rows each, whose zeros do not fill words"):
        stackable(Stack(matrix, 2, ("MergeModulelist", "Concatenate")), (36, 32), settings)


def test_other_bits_of_gptq_are_refused(tmp_path):
    write_dense(tmp_path, "gptq")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"]["bits"] = 8
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"its format is gptq in 8 bits; only GPTQ and AWQ .gemm. in 4 bits are"):
        load_packed(str(tmp_path), dtype="auto")


AGAIN = r". Download or write it again\."


def without(*names):
    """What takes tensors out of a checkpoint."""

    def alter(tensors, settings):
        for name in names:
            del tensors[name]

    return alter


def without_all(path):
    """What takes all tensors of a module out of a checkpoint."""

    def alter(tensors, settings):
        for name in [name for name in tensors if name.startswith(f"{path}.")]:
            del tensors[name]

    return alter


def twice(name):
    """What doubles the rows of a tensor."""

    def alter(tensors, settings):
        tensors[name] = torch.cat([tensors[name], tensors[name]])

    return alter


def spoilt(name, value=float("nan")):
    """What makes the last number of a tensor NaN or infinite; bytes of e8m0 and e4m3 have NaN alone."""

    def alter(tensors, settings):
        number = tensors[name]
        of_bytes = number.element_size() == 1
        tensors[name] = (number.view(torch.uint8) if of_bytes else number).clone()
        tensors[name].view(-1)[-1] = 255 if of_bytes else value
        tensors[name] = tensors[name].view(number.dtype)

    return alter


DAMAGED = {
    "fp8 blocks": ("weight_scale_inv", r"\(4, 1\), .* of \(192, 128\) they must be \(2, 1\) or "),
    "fp8 rows": ("weight_scale", r"\(384, 1\), .* of \(192, 128\) they must be \(192, 1\) or "),
    "mxfp8": ("weight_scale_inv", r"\(384, 4\), .* of \(192, 128\) they must be \(192, 4\) or "),
    "nvfp4": ("weight_scale", r"\(384, 8\) of .* of \(192, 128\) it must be \(192, 8\) of "),
    "int4": ("weight_scale", r"'weight_scale' is \(384, 4\); for a weight of \(192, 128\) it must have its rows"),
    "gptq": ("scales", r"\(8, 192\) of .* of \(192, 128\) it must be \(4, 192\) of "),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_scales_that_are_missing_of_another_shape_or_no_numbers(name, tmp_path):
    scales, shapes = DAMAGED[name]
    cases = {
        without(f"{LAYER}.{scales}"): rf"^The checkpoint is damaged: '{LAYER}' has .*, and no .*'{scales}'.*{AGAIN}",
        twice(f"{LAYER}.{scales}"): f"'{LAYER}' cannot stay packed: .*{shapes}",
        spoilt(
            f"{LAYER}.{scales}"
        ): rf"damaged: 1 of the \d+ scales of '{LAYER}' .'{scales}'. are NaN or infinite, the "
        rf"first at .*, and must be finite{AGAIN}",
    }
    for number, (alter, message) in enumerate(cases.items()):
        write_dense(tmp_path / str(number), name)
        change(tmp_path / str(number), alter)
        with pytest.raises(ValueError, match=message):
            load_packed(str(tmp_path / str(number)), dtype="auto")


OTHERS_DAMAGED = {
    "codes of fp8": ("fp8 blocks", without(f"{LAYER}.weight"), f"'{LAYER}' has 'weight_scale_inv', and neither codes"),
    "codes of int4": (
        "int4",
        without(f"{LAYER}.weight_packed"),
        f"'{LAYER}' has 'weight_scale', .*, and neither codes",
    ),
    "rows": ("fp8 blocks", twice(f"{LAYER}.weight"), r"'weight' is \(384, 128\); .* must be \(192, 128\)"),
    "global": ("nvfp4", without(f"{LAYER}.weight_global_scale"), f"'{LAYER}' .* NVFP4 without a 'weight_global_scale'"),
    "globals": ("nvfp4", twice(f"{LAYER}.weight_global_scale"), r"'weight_global_scale' is \(2,\), and one number is "),
    "a global of NaN": ("nvfp4", spoilt(f"{LAYER}.weight_global_scale"), "1 of the 1 scales of .* are NaN, infinite"),
    "a global of 0": (
        "nvfp4",
        spoilt(f"{LAYER}.weight_global_scale", 0.0),
        f"1 of the 1 scales of '{LAYER}' .'weight_global_scale'. are NaN, infinite or 0, .* must be finite and not 0",
    ),
    "a global of 0 that multiplies": (
        "modelopt nvfp4",
        spoilt(f"{LAYER}.weight_scale_2", 0.0),
        "are NaN, infinite or 0, .* must be finite and not 0",
    ),
    "groups": (
        "gptq shuffled",
        spoilt(f"{LAYER}.g_idx", 4),
        f"'g_idx' of '{LAYER}' has groups from 0 to 4, and its 4 groups are 0 to 3",
    ),
    "groups of int4": (
        "int4",
        lambda tensors, _: tensors.update({f"{LAYER}.weight_g_idx": torch.arange(128, dtype=torch.int32) // 32 - 1}),
        f"'weight_g_idx' of '{LAYER}' has groups from -1 to 2, and its 4 groups are 0 to 3",
    ),
    "nothing": ("fp8 blocks", without_all(LAYER), f"no weight of '{LAYER}', which its configuration does not leave"),
    "codes in 16 bits": (
        "fp8 blocks",
        lambda tensors, _: tensors.update({f"{LAYER}.weight": torch.ones(192, 128, dtype=torch.bfloat16)}),
        f"'{LAYER}' has 'weight', 'weight_scale_inv', and no codes: its weight is in torch.bfloat16",
    ),
    "zeros of gptq": ("gptq", without(f"{LAYER}.qzeros"), f"'{LAYER}' has .*, and no 'qzeros'"),
    "zeros": (
        "int4 with zeros",
        without(f"{LAYER}.weight_zero_point"),
        f"'{LAYER}' .* no 'weight_zero_point', and its ",
    ),
}


@pytest.mark.parametrize("name", OTHERS_DAMAGED)
def test_other_parts_of_a_layer_that_are_missing_or_wrong(name, tmp_path):
    form, alter, message = OTHERS_DAMAGED[name]
    write_dense(tmp_path, form)
    change(tmp_path, alter)
    with pytest.raises(ValueError, match=message):
        load_packed(str(tmp_path), dtype="auto")


EXPERTS_DAMAGED = {
    "scales": (without(f"{EXPERT}.weight_scale"), f"'{EXPERT}' has 'input_scale', 'weight', and no .*'weight_scale'"),
    "codes": (without(f"{EXPERT}.weight"), f"'{EXPERT}' has .*'weight_scale', and neither codes nor a weight{AGAIN}"),
    "shape": (
        twice(f"{EXPERT}.weight_scale"),
        rf"'{EXPERT}.weight_scale' is torch.bfloat16 of \(256, 1\), and '{STACKS}.0.gate_proj.weight_scale', with "
        rf"which it is stacked, torch.bfloat16 of \(128, 1\){AGAIN}",
    ),
    "infinite": (
        spoilt(f"{EXPERT}.weight_scale", float("inf")),
        rf"1 of the 1024 scales of '{STACKS}.gate_up_proj' .'weight_scale'. are NaN .*, the first at \(2, 255, 0\)",
    ),
    "stack": (without_all(STACKS), f"no weight of '{STACKS}.down_proj', which its configuration does not leave in 16"),
    "expert": (
        without_all(EXPERT),
        rf"'{STACKS}.gate_up_proj' cannot stay packed: .* has 7 of its 8 matrices in few bits; the others ",
    ),
}


@pytest.mark.parametrize("name", EXPERTS_DAMAGED)
def test_damaged_experts_are_named(name, tmp_path):
    alter, message = EXPERTS_DAMAGED[name]
    write_mixture(tmp_path, "fp8 rows")
    change(tmp_path, alter)
    with pytest.raises(ValueError, match=message):
        load_packed(str(tmp_path), dtype="auto")


def test_scales_of_inputs_may_be_missing_of_some_experts(tmp_path):
    write_mixture(tmp_path, "fp8 rows")
    whole = load_packed(str(tmp_path), dtype="auto")(IDS).logits
    change(tmp_path, without(f"{EXPERT}.input_scale"))
    assert torch.equal(load_packed(str(tmp_path), dtype="auto")(IDS).logits, whole)


@pytest.mark.parametrize(("part", "alter"), [("scales", without), ("blocks", without), ("scales", spoilt)])
def test_damaged_stacks_are_named(part, alter, tmp_path):
    low_bit.write_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts"
    change(tmp_path, alter(f"{name}.gate_up_proj_{part}"))
    other = "blocks" if part == "scales" else "scales"
    messages = {
        without: f"'{name}' has 'gate_up_proj_{other}', of which blocks or scales are missing{AGAIN}",
        spoilt: rf"1 of the 1536 scales of '{name}.gate_up_proj' .* are NaN or infinite, the first at \(3, 191, 1\)",
    }
    with pytest.raises(ValueError, match=messages[alter]):
        load_packed(str(tmp_path), dtype="auto")


@pytest.mark.parametrize("kept", [0, 50, 5000])
def test_a_file_that_is_cut_short_is_named(kept, tmp_path):
    write_dense(tmp_path, "fp8 blocks")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"damaged: '{file}' is no whole safetensors file .*{AGAIN}"):
        load_packed(str(tmp_path), dtype="auto")


def test_a_layer_that_its_class_keeps_in_fp32_keeps_its_codes(tmp_path, monkeypatch):
    meant = write_dense(tmp_path, "fp8 blocks")
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"up_proj"})
    model = load_packed(str(tmp_path), dtype="auto")
    layer = packed_layers(model)[LAYER]
    assert layer.codes.dtype == torch.uint8
    torch.testing.assert_close(layer.decoded(torch.float32), meant[f"{LAYER}.weight"], rtol=1e-6, atol=0)
