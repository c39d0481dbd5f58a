"""Tiny checkpoints in every format that may stay packed, written as they are published, with what they mean.

Codes and scales are drawn; what they mean is computed here, by the formulas of the formats, from a table of their
values and not from our code.
"""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.attention.families import build

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _grid(scale, shape, block):
    rows, columns = shape
    return scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _power(byte):
    return torch.exp2(byte.float() - 127)


def _scales(*shape):
    return torch.rand(shape) * 2e-4 + 1e-4


def _codes(rows, columns):
    return (torch.randn(rows, columns) * 200).clamp(-448, 448).to(E4M3)


def fp8_blocks(rows, columns, block=(128, 128)):
    codes, scale = _codes(rows, columns), _scales(-(-rows // block[0]), -(-columns // block[1]))
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * _grid(scale, (rows, columns), block)


def fp8_powers(rows, columns):
    codes = _codes(rows, columns)
    byte = torch.randint(112, 116, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
    power = _grid(_power(byte), (rows, columns), (128, 128))
    return {"weight": codes, "weight_scale_inv": byte.view(E8M0)}, codes.float() * power


def mxfp8(rows, columns):
    codes, byte = _codes(rows, columns), torch.randint(112, 116, (rows, columns // 32), dtype=torch.uint8)
    return {"weight": codes, "weight_scale_inv": byte}, codes.float() * _grid(_power(byte), (rows, columns), (1, 32))


def fp8_tensor(rows, columns):
    codes, scale = _codes(rows, columns), _scales(1)[0]
    named = {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.02)}
    return named, codes.float() * scale


def fp8_rows(rows, columns):
    codes, scale = _codes(rows, columns), _scales(rows, 1).to(torch.bfloat16)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.5])}, codes.float() * scale.float()


def modelopt_fp8(rows, columns):
    codes, scale = _codes(rows, columns), _scales(1)[0]
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, codes.float() * scale


def _nibbles(codes):
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def _nvfp4(rows, columns):
    codes = torch.randint(0, 16, (rows, columns))
    scale = (torch.rand(rows, columns // 16) * 200 + 20).to(E4M3)
    return codes, scale, E2M1[codes]


def nvfp4(rows, columns):
    codes, scale, values = _nvfp4(rows, columns)
    divisor = torch.rand(1) * 2000 + 8000
    named = {"weight_packed": _nibbles(codes), "weight_scale": scale, "weight_global_scale": divisor}
    return named, values * (scale.float() / divisor).repeat_interleave(16, 1)


def modelopt_nvfp4(rows, columns):
    codes, scale, values = _nvfp4(rows, columns)
    factor = torch.tensor(1e-4)
    named = {"weight": _nibbles(codes), "weight_scale": scale, "weight_scale_2": factor}
    return named, values * (scale.float() * factor).repeat_interleave(16, 1)


def _words(numbers, order=range(8), less=0):
    """Eight numbers of 4 bits of the last dimension in an int32, the first of `order` in its lowest bits.

    Args:
        numbers: Numbers from 0 to 15.
        order: Which of eight neighbours come one after another.
        less: A number that is taken from each word of eight, modulo 2^32.
    """
    parts = numbers.unflatten(-1, (-1, 8))[..., list(order)].long()
    word = ((parts << torch.arange(0, 32, 4)).sum(-1) - less) % 2**32
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def _integers(rows, columns, group):
    numbers, zeros = torch.randint(0, 16, (rows, columns)), torch.randint(0, 16, (rows, columns // group))
    scale = _scales(rows, columns // group) * 100
    return numbers, zeros, scale


def int4(rows, columns, group=32):
    numbers, _, scale = _integers(rows, columns, group)
    scale = scale.to(torch.bfloat16)
    named = {
        "weight_packed": _words(numbers), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip
    return named, (numbers - 8) * scale.float().repeat_interleave(group, 1)


def int4_zeros(rows, columns, group=32):
    numbers, zeros, scale = _integers(rows, columns, group)
    named = {
        "weight_packed": _words(numbers), "weight_scale": scale, "weight_zero_point": _words(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip
    return named, (numbers - zeros.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)


def gptq(rows, columns, group=32, shuffled=False, less=0x11111111):
    numbers, zeros, scale = _integers(rows, columns, group)
    scale = scale.to(torch.float16)
    of = torch.arange(columns, dtype=torch.int32) // group
    of = of[torch.randperm(columns)] if shuffled else of
    named = {
        "qweight": _words(numbers).T.contiguous(), "scales": scale.T.contiguous(), "g_idx": of,
        "qzeros": _words(zeros.T, less=less).contiguous(),  # the first version of the format stores less
    }  # fmt: skip
    return named, (numbers - zeros[:, of.long()]) * scale.float()[:, of.long()]


def gptq_shuffled(rows, columns):
    return gptq(rows, columns, shuffled=True)


def gptq_v2(rows, columns):
    return gptq(rows, columns, less=0)


def awq(rows, columns, group=32):
    numbers, zeros, scale = _integers(rows, columns, group)
    scale = scale.to(torch.float16)
    named = {
        "qweight": _words(numbers.T, AWQ_ORDER), "qzeros": _words(zeros.T, AWQ_ORDER), "scales": scale.T.contiguous(),
    }  # fmt: skip
    return named, (numbers - zeros.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)


def _compressed(form, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": groups}  # fmt: skip


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS = {
    "fp8 blocks": (fp8_blocks, {**_FP8, "weight_block_size": [128, 128]}),
    "fp8 ue8m0": (fp8_powers, {**_FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}),
    "mxfp8": (mxfp8, {**_FP8, "quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
    "fp8 tensor": (fp8_tensor, {**_FP8, "weight_block_size": None, "activation_scheme": "static"}),
    "fp8 rows": (fp8_rows, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)),
    "modelopt nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "int4": (int4, _compressed("pack-quantized", **_W4)),
    "int4 with zeros": (int4_zeros, _compressed("pack-quantized", **_W4, symmetric=False)),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "gptq shuffled": (
        gptq_shuffled,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    ),
    "gptq v2": (
        gptq_v2,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
}
"""What makes the tensors of a matrix, (rows, columns), and the configuration of the checkpoint."""


def write(folder, tensors, config, quantization):
    """A checkpoint in `folder`."""
    folder.mkdir(exist_ok=True)
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    settings = {**config.to_dict(), "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(settings))


def write_dense(folder, name, **sizes):
    """A dense model in the format `name`; the state of the dequantised model, in fp32."""
    torch.manual_seed(0)
    make, quantization = FORMATS[name]
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | sizes), architectures=["LlamaForCausalLM"]))
    tensors, meant = {}, {}
    for key, value in model.to(torch.bfloat16).state_dict().items():
        if "_proj" in key:
            made, meant[key] = make(*value.shape)
            tensors |= {key.replace("weight", leaf): tensor for leaf, tensor in made.items()}
        else:
            tensors[key], meant[key] = value, value.float()
    write(folder, tensors, model.config, quantization)
    return meant


def add_scales_of_caches(folder, text="model"):
    """Scales of a KV cache as servers read them, of the attention or beside a projection in 16 bits; their names."""
    file, added = folder / "model.safetensors", {}
    for number, owner in enumerate(("", "k_proj.", "v_proj.")):
        for each in "kv":
            added[f"{text}.layers.{number % 2}.self_attn.{owner}{each}_scale"] = torch.tensor([0.5 + number])
    added[f"{text}.layers.9.self_attn.k_scale"] = torch.tensor([0.5])  # of a layer that the model has not
    save_file({**load_file(file), **added}, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    owner = settings if "quantization_config" in settings else settings["text_config"]
    owner["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    (folder / "config.json").write_text(json.dumps(settings))
    return [name for name in added if ".9." not in name]


def write_nested(folder):
    """A model of images and text in FP8 blocks, which its text configuration alone says."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=SIZES, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        architectures=["Gemma3ForConditionalGeneration"],
    )  # fmt: skip
    make, quantization = FORMATS["fp8 blocks"]
    model, tensors = Gemma3ForConditionalGeneration(config).to(torch.bfloat16), {}
    for key, value in model.state_dict().items():
        if "language_model" in key and "_proj" in key:
            tensors |= {key.replace("weight", leaf): tensor for leaf, tensor in make(*value.shape)[0].items()}
        elif key != "lm_head.weight":
            tensors[key] = value
    write(folder, tensors, config, None)
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    settings["text_config"]["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings))
    return type(model)


def write_mixture(folder, name="fp8 blocks"):
    """A mixture whose experts and linear layers are in the format `name`; as `write_dense`."""
    torch.manual_seed(0)
    more = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **more, architectures=["Qwen3MoeForCausalLM"]))
    return _write_mixture(folder, model, name)


def write_latent_mixture(folder):
    """A mixture with latent attention and a shared expert, all its linear layers in FP8 with a scale a row.

    As GLM-4.7-Flash in FP8, the files hold the layer that predicts further tokens too, which transformers has not.
    """
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
    more = {
        "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
        "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48,
        "architectures": ["Glm4MoeLiteForCausalLM"],
    }  # fmt: skip
    model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**sizes, **more))
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_(std=0.1)
    further, _ = fp8_rows(64, 128)
    named = {f"model.layers.47.mlp.shared_experts.up_proj.{leaf}": tensor for leaf, tensor in further.items()}
    return _write_mixture(folder, model, "fp8 rows", named | {"model.layers.47.eh_proj.weight": torch.randn(128, 256)})


def write_indexed(folder, name):
    """A model with sparse attention, the linear layers of its attention and its indexers in FP8 with a scale a row.

    Its class and, as of `write_dense`, what it means.
    """
    torch.manual_seed(0)
    model, (make, quantization) = build(name, index_topk=3), FORMATS["fp8 rows"]
    tensors, meant = {}, {}
    for key, value in model.to(torch.bfloat16).state_dict().items():
        if ".self_attn." in key and value.dim() == 2 and "conv" not in key:
            made, meant[key] = make(*value.shape)
            tensors |= {f"{key.removesuffix('weight')}{leaf}": tensor for leaf, tensor in made.items()}
        else:
            tensors[key], meant[key] = value, value.float()
    write(folder, tensors, model.config, quantization)
    return type(model), meant


def _write_mixture(folder, model, name, more=()):
    make, quantization = FORMATS[name]
    tensors, meant = dict(more), {}

    def add(key, shape):
        made, weight = make(*shape)
        tensors.update({f"{key}.{leaf}": tensor for leaf, tensor in made.items()})
        return weight

    for key, value in model.to(torch.bfloat16).state_dict().items():
        if ".experts." in key:
            path, each = key.rpartition(".")[0], []
            for expert, weight in enumerate(value):
                names = ["down"] if "down" in key else ["gate", "up"]
                shape = (len(weight) // len(names), weight.shape[1])
                each.append(torch.cat([add(f"{path}.{expert}.{part}_proj", shape) for part in names]))
            meant[key] = torch.stack(each)
        elif "_proj" in key:
            meant[key] = add(key.removesuffix(".weight"), value.shape)
        else:
            tensors[key], meant[key] = value, value.float()
    write(folder, tensors, model.config, quantization)
    return meant
