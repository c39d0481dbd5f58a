"""Tiny models in 8 bits and fewer, built by hand: in memory with the hub's kernels replaced, and as checkpoints."""

from __future__ import annotations

import copy
import functools
import json
from types import SimpleNamespace

import torch
import transformers.integrations.finegrained_fp8 as fp8
from safetensors.torch import save_file
from torch import nn
from transformers import (
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BLOCK = (128, 128)
_SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 128,
}  # fmt: skip


def dense() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES)).to(torch.bfloat16)


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    more = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **more)).to(torch.bfloat16)


def decoded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape[-2:]
    scale = scale.float().repeat_interleave(BLOCK[0], -2)[..., :rows, :].repeat_interleave(BLOCK[1], -1)[..., :columns]
    return weight.float() * scale


def _matmul(x, weight, scale, block, out_dtype, activation_scale=None):
    return (x.float() @ decoded(weight, scale).t()).to(out_dtype or x.dtype)


def _grouped(x, weight, scale, offsets=None, tokens_per_expert=None, block_size=None):
    out, start = x.new_zeros(len(x), weight.shape[1]), 0
    for expert, end in enumerate(offsets.tolist()):
        out[start:end] = (x[start:end].float() @ decoded(weight[expert], scale[expert]).t()).to(x.dtype)
        start = end
    return out


def in_fp8(model, monkeypatch):
    """A copy of `model` with transformers' modules for 8-bit floats in blocks, which run on the CPU in the test."""
    kernels = fp8.FineGrainedFP8(matmul=_matmul, batched_matmul=None, grouped_matmul=_grouped)
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", kernels)
    config = FineGrainedFP8Config(weight_block_size=BLOCK)
    quantize = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    model = copy.deepcopy(model)
    fp8.replace_with_fp8_linear(model, ["lm_head"], config, pre_quantized=True)
    for path, module in model.named_modules():
        stacked = isinstance(module, fp8.FP8Experts)
        for name in ("gate_up_proj", "down_proj") if stacked else ["weight"] * isinstance(module, fp8.FP8Linear):
            key = f"{path}.{name}"
            made = quantize(key, weights[key])
            scale = next(value for made_name, value in made.items() if made_name.endswith("scale_inv"))
            setattr(module, name, nn.Parameter(made[key], requires_grad=False))
            setattr(module, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
    if any(isinstance(module, fp8.FP8Experts) for module in model.modules()):
        model.set_experts_implementation("grouped_mm")
    return model


class Dynamic8BitLinear(nn.Linear):
    """Quantises its input as well, with an operator that has no derivative."""

    def forward(self, x):
        codes = torch.clamp((x.detach() / 0.05).round(), -127, 127).to(torch.int8)
        return nn.functional.linear(codes.to(x.dtype) * 0.05, self.weight, self.bias)


def with_quantised_activations(model, way):
    """`model` with linear layers that cut the gradient: by their own forward, by their class, or by their weight."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is not nn.Linear or name == "lm_head":
                continue
            child.weight.requires_grad_(False)
            child.register_buffer("weight_scale", torch.ones(len(child.weight), 1))
            if way == "class":
                child.__class__ = Dynamic8BitLinear
            else:
                child.forward = functools.partial(_quantised_forward, child)
    return model


def _quantised_forward(module, x):
    with torch.no_grad():
        x = (x / 0.05).round().clamp(-127, 127) * 0.05
    return nn.functional.linear(x, module.weight, module.bias)


def _write(folder, tensors, config, quantization):
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    settings = {**config.to_dict(), "dtype": "bfloat16"}
    if quantization is not None:
        settings["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings))


def write_fp8(folder):
    """The checkpoint of a mixture in 8-bit floats, in the published layout; the dequantised weights by name."""
    model = mixture()
    model.config.architectures = ["Qwen3MoeForCausalLM"]
    config = FineGrainedFP8Config(weight_block_size=BLOCK)
    quantize = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one
    tensors, expected = {}, {}

    def add(name, weight):
        made = quantize(name, weight)
        tensors.update(made)
        return decoded(made[name], made[f"{name}_scale_inv"]).to(torch.bfloat16)

    for name, value in model.named_parameters():
        value = value.detach()
        if ".experts." in name:
            path = name.rpartition(".")[0]
            rows = []
            for expert, weight in enumerate(value):
                parts = {"down": weight} if "down" in name else dict(zip(("gate", "up"), weight.chunk(2)))
                rows.append(
                    torch.cat([add(f"{path}.{expert}.{part}_proj.weight", each) for part, each in parts.items()])
                )
            expected[name] = torch.stack(rows)
        elif value.dim() == 2 and "_proj" in name:
            expected[name] = add(name, value)
        else:
            tensors[name] = value.clone()
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK,
                    "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    _write(folder, tensors, model.config, quantization)
    return expected


def write_mxfp4(folder):
    """The checkpoint of a mixture with 4-bit experts, in the published layout."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4}
    config = GptOssConfig(
        **sizes, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
        architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    tensors = {}
    for name, value in GptOssForCausalLM(config).to(torch.bfloat16).named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = value.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        else:
            tensors[name] = value.detach().clone()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(folder, tensors, config, {"quant_method": "mxfp4", "modules_to_not_convert": skipped})


def write_unscaled(folder, dtype, quantization):
    """The checkpoint of a dense model in 8 bits, one scale a weight, in a format that transformers does not know."""
    model = dense()
    model.config.architectures = ["LlamaForCausalLM"]
    tensors = {}
    for name, value in model.named_parameters():
        if value.dim() == 2 and "_proj" in name:
            largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
            scale = value.detach().float().abs().max() / largest
            codes = value.detach().float() / scale
            tensors[name] = (codes.round() if dtype == torch.int8 else codes).to(dtype)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = value.detach().clone()
    _write(folder, tensors, model.config, quantization)
