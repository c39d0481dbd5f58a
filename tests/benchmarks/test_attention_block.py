"""The benchmark of attention by itself runs each provider on the same numbers."""

import pytest
import torch
from transformers import GlmMoeDsaConfig

from liger_trainer.benchmarks.attention_block import PROVIDERS, Rows, main, measure, published
from liger_trainer.benchmarks.device import Device

_TINY = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "vocab_size": 64,
    "first_k_dense_replace": 2,
    "mlp_layer_types": ["dense", "dense"],
}


@pytest.mark.parametrize("document", [0, 12])
def test_each_provider_computes_the_same(document):
    device = Device(torch.device("cpu"))
    found = [measure(GlmMoeDsaConfig(**_TINY), each, Rows(2, 24, document), device, rounds=1) for each in PROVIDERS]
    torch.testing.assert_close(found[0].result, found[1].result)
    assert all(each.forward > 0 and each.backward > 0 for each in found)


def test_the_configuration_of_a_type_has_no_experts():
    config = published("glm_moe_dsa", 4)
    assert config.mlp_layer_types == ["dense"] * 4
    assert (config.num_attention_heads, config.index_topk) == (64, 2048)


def test_the_command(monkeypatch, capsys):
    tiny = GlmMoeDsaConfig(**_TINY)
    monkeypatch.setattr("liger_trainer.benchmarks.attention_block.published", lambda kind, layers: tiny)
    main(["glm_moe_dsa", "--batch", "1", "--length", "16", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert all(provider in printed for provider in PROVIDERS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such"], "'no_such' is no type of a causal language model"),
        (["clip"], "'clip' is no type of a causal language model"),
        (["llama", "--layers", "0"], "`--batch` and `--length` must be 1 or more"),
        (["llama", "--providers", "hg"], "No provider 'hg'. Did you mean 'hf'?"),
        (["llama", "--device", "tpu0"], "tpu0"),
        (["llama", "--length", "4", "--documents", "5"], "`--documents` is 5; give 0 to 4"),
        (["gpt2", "--layers", "1", "--length", "8", "--device", "cpu"], "The layers of 'gpt2' are not `layers`"),
        (["mamba", "--layers", "1", "--length", "8", "--device", "cpu"], "The layers of 'mamba' are not `layers`"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
