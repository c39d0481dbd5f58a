"""Models of which there is nothing but a config.json."""

import pytest
from transformers import Gemma3Config, LlamaConfig, Qwen3MoeConfig

_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_GEMMA = {
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
}
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}


@pytest.fixture(scope="session")
def configs(tmp_path_factory):
    """Family to a folder with its published sizes, as the shipped recipes name it in their file names."""
    root = tmp_path_factory.mktemp("configs")
    sizes = {
        "llama3_8b": LlamaConfig(**_LLAMA),
        "qwen3_30b_a3b": Qwen3MoeConfig(**_QWEN),
        "gemma3_4b": Gemma3Config(text_config=_GEMMA, vision_config=_SIGLIP),
    }
    for name, config in sizes.items():
        config.save_pretrained(root / name)
    return {name: str(root / name) for name in sizes}
