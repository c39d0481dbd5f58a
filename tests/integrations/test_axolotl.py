"""The plug-in for axolotl, called as axolotl does: registered, validated, then given each model."""

import re

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.documents import ROOT
from tests.integrations.frameworks import Config, CutCrossEntropyArgs, LigerArgs, validate
from tests.tiny_models import TINY_MODELS, tiny_batch

PLUGIN = "liger_trainer.integrations.axolotl.LigerTrainerPlugin"


@pytest.fixture
def plugin(axolotl):
    return axolotl.load_plugin(PLUGIN)


class Theirs:
    """A plug-in of axolotl's own, of which only the keys matter here."""

    def __init__(self, args):
        self.args = args

    def get_input_args(self):
        return f"{self.args.__module__}.{self.args.__name__}"


def validated(plugin, *others, **keys):
    config = Config(keys)
    plugin.register(config)
    return validate(config, plugin, *others)


def adapted():
    model = TINY_MODELS["llama"]().train()
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def test_a_model_with_adapters_gets_the_kernels(plugin, tmp_path, capsys):
    config = validated(plugin, adapter="lora", liger_kernel_config={"rope": False})
    model = adapted()
    batch = tiny_batch("llama", model)
    expected = model(**batch).loss
    plugin.post_model_load(config, TINY_MODELS["llama"]())  # a reference model
    plugin.post_model_load(config, model)
    (callback,) = plugin.add_callbacks_pre_trainer(config, model)
    torch.testing.assert_close(model(**batch).loss, expected)
    applied = {row.component for row in callback.report.applied}
    assert applied >= {"lora", "rms_norm", "attention", "linear_cross_entropy"}
    assert "rope" not in applied
    callback.on_train_begin(TrainingArguments(str(tmp_path)), TrainerState(), TrainerControl())
    assert capsys.readouterr().out.count("kernels in LlamaForCausalLM in PeftModel") == 1


def test_a_model_that_it_was_not_given_has_no_report(plugin):
    assert plugin.add_callbacks_pre_trainer(Config(), torch.nn.Linear(2, 2)) == []


def test_lora_is_ours_unless_the_config_says_otherwise(plugin, caplog):
    keys = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
    config = validated(plugin, adapter="qlora")
    assert [config.get(key) for key in keys] == [False] * 3
    assert "not on axolotl's" in caplog.text
    config = validated(plugin, adapter="qlora", liger_kernel_config={"lora": False})
    assert [config.get(key) for key in keys] == [True] * 3
    config = validated(plugin, adapter="lora", lora_o_kernel=False)
    assert [config.get(key) for key in keys] == [None, None, False]
    assert "lora_o_kernel" not in validated(plugin)


@pytest.mark.parametrize(
    ("keys", "switches"),
    [
        ({"liger_rope": True}, ["rope"]),
        ({"liger_rms_norm": True}, ["rms_norm"]),
        ({"liger_glu_activation": True}, ["swiglu", "geglu"]),
        ({"tiled_mlp": True}, ["swiglu", "geglu"]),
        ({"liger_fused_linear_cross_entropy": True}, ["linear_cross_entropy", "cross_entropy"]),
        ({"chunked_cross_entropy": True}, ["linear_cross_entropy", "cross_entropy"]),
        ({"adapter": "lora", "lora_qkv_kernel": True}, ["lora"]),
    ],
)
def test_axolotls_kernels_for_the_same_layers_are_refused(plugin, keys, switches):
    with pytest.raises(ValueError, match=f"`{[*keys][-1]}` is True") as raised:
        validated(plugin, Theirs(LigerArgs), **keys)
    assert f"`liger_kernel_config: {{{', '.join(f'{switch}: false' for switch in switches)}}}`" in str(raised.value)
    off = dict.fromkeys(switches, False)
    assert validated(plugin, Theirs(LigerArgs), **keys, liger_kernel_config=off).liger_kernel_config == off


def test_its_plugin_for_cut_cross_entropy_is_refused_without_a_key(plugin):
    with pytest.raises(ValueError, match="`cut_cross_entropy` is True"):
        validated(plugin, Theirs(CutCrossEntropyArgs))
    assert validated(plugin, Theirs(CutCrossEntropyArgs), cut_cross_entropy=False).cut_cross_entropy is False


def test_wrong_switches_are_refused_before_a_model_is_loaded(plugin):
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        validated(plugin, liger_kernel_config={"ropes": False})


def test_strict_kernels(plugin):
    config = validated(plugin, strict_kernels=True, liger_kernel_config={"geglu": True})
    with pytest.raises(ValueError, match="geglu: the model has nothing of the kind"):
        plugin.post_model_load(config, TINY_MODELS["llama"]())


def test_the_config_of_the_documentation(plugin):
    text = (ROOT / "docs" / "guides" / "frameworks.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## axolotl.*?```text\n(.*?)```", text, flags=re.DOTALL)
    config = yaml.safe_load(block)
    assert config["plugins"] == [PLUGIN]
    assert validated(plugin, **config).liger_kernel_config == {"logits_memory": "512MiB"}
    with pytest.raises(ValueError, match="`cut_cross_entropy` is True"):
        validated(plugin, Theirs(CutCrossEntropyArgs), **config)
