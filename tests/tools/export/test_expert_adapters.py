"""Adapters on stacked experts, taken apart: on a model whose experts are layers, and read back, they are the same."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2MoeForCausalLM, Qwen2MoeForCausalLM

from liger_trainer import load_packed
from liger_trainer.errors import UserError
from liger_trainer.tools.cli import main
from liger_trainer.tools.export.expert_adapters import FILE, export_per_expert
from liger_trainer.tools.export.merging import merge
from liger_trainer.tools.export.saved_run import find_run
from liger_trainer.trainers.checkpoints.saved_weights import write_base_quantization
from tests.packed_checkpoints import write_latent_mixture, write_mixture
from tests.tiny_models import TINY_MODELS
from tests.tools.cli.runs import message_of

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.arange(3, 35).view(2, 16)
NAMES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


def run_of(folder, family="qwen3_moe", base=None, **lora):
    """A base model, and random adapters on it in float64, as a run saves them."""
    if base is None:
        TINY_MODELS[family]().save_pretrained(folder / "base")
        base = load(folder / "base")
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS, **lora}
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options), autocast_adapter_dtype=False)
    torch.manual_seed(0)
    for name, each in adapted.named_parameters():
        if "lora_" in name:
            each.data.normal_(std=0.1)
    adapted.save_pretrained(folder / "run")
    return adapted.eval()


def exported(folder):
    found = export_per_expert(find_run(str(folder / "run")), folder / "apart", lambda line: None)
    return found, load_file(folder / "apart" / FILE), json.loads((folder / "apart" / "adapter_config.json").read_text())


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


class Expert(nn.Module):
    def __init__(self, gate_up, down, names, activation):
        super().__init__()
        self.names, self.activation = names, activation
        for name, weight in zip(names, (*gate_up.chunk(2), down), strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight.clone())
            self.add_module(name, layer)

    def forward(self, x):
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(self.activation(gate(x)) * up(x))


class Unstacked(nn.ModuleList):
    """Experts of linear layers, as transformers 4 had them."""

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = (index == number).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out


def unstacked(folder, family):
    """The base model with `Unstacked` experts, under the names of its checkpoint."""
    model = load(folder / "base")
    for layer in model.model.layers:
        stacked, names = layer.mlp.experts, NAMES[family]
        each = zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
        layer.mlp.experts = Unstacked(Expert(*weights, names, stacked.act_fn) for weights in each)
        if family == "mixtral":
            layer.block_sparse_moe = layer.mlp
            del layer.mlp
            layer.forward = _forward_of_mixtral.__get__(layer)
    model.config.model_type = "unstacked"  # else PEFT would take the names for those of the stacks
    return model.eval()


def _forward_of_mixtral(layer, hidden_states, **options):
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    hidden_states = hidden_states + attended
    return hidden_states + layer.block_sparse_moe(layer.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize("family", NAMES)
def test_on_a_model_whose_experts_are_layers(family, tmp_path):
    adapted = run_of(tmp_path, family)
    found, tensors, config = exported(tmp_path)
    assert (found.layers, found.rank, found.lacking) == (2 * 4 * 3, 4, ())
    assert config["target_parameters"] is None
    assert {*config["target_modules"]} == {"q_proj", "o_proj", *NAMES[family]}
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    published = load_file(tmp_path / "base" / "model.safetensors")
    assert {f"{name}.weight" for name in layers} <= {*published}
    assert sum(".experts." in name for name in layers) == sum(".experts." in name for name in published)
    model = PeftModel.from_pretrained(
        unstacked(tmp_path, family), tmp_path / "apart", autocast_adapter_dtype=False
    ).eval()
    wanted = logits(adapted)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-12, atol=1e-12)
    with model.disable_adapter(), adapted.disable_adapter():
        plain = logits(adapted)
        torch.testing.assert_close(logits(model), plain, rtol=1e-12, atol=1e-12)
    assert (wanted - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    "lora", [{}, {"target_modules": "all-linear", "target_parameters": None}, {"use_rslora": True}]
)
def test_read_back_by_peft(lora, tmp_path):
    """PEFT stacks adapters of single experts itself; of `all-linear` it makes gate and up twice the rank."""
    adapted = run_of(tmp_path, **lora)
    found, tensors, config = exported(tmp_path)
    rank = 8 if "target_modules" in lora else 4
    alpha = 4 * rank if "use_rslora" in lora else 2 * rank
    assert (found.rank, config["r"], config["lora_alpha"], config["use_rslora"]) == (rank, rank, alpha, False)
    assert found.by_peft
    assert {each.shape[0] for name, each in tensors.items() if "lora_A" in name} == {rank}
    assert not config["rank_pattern"]
    again = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "apart", autocast_adapter_dtype=False).eval()
    torch.testing.assert_close(logits(again), logits(adapted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", [Qwen2MoeForCausalLM, Lfm2MoeForCausalLM])
def test_families_whose_experts_peft_does_not_stack(family, tmp_path, capsys):
    """It leaves out adapters on experts, which is said; the tensors are those of the published names."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    more = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32}
    own = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1} if family is Lfm2MoeForCausalLM else {}
    family(family.config_class(**sizes, **more, **own)).save_pretrained(tmp_path / "base")
    adapted = run_of(tmp_path, base=load(tmp_path / "base"), target_modules=["q_proj"])
    assert main(["export-adapter", str(tmp_path / "run"), "--layout", "per-expert"]) == 0
    assert "PEFT cannot read this folder on this model, whose experts it does not stack; servers" in (
        capsys.readouterr().out
    )
    tensors = load_file(tmp_path / "run" / "per-expert" / FILE)
    published = load_file(tmp_path / "base" / "model.safetensors")
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    assert {f"{name}.weight" for name in names} <= {*published}
    again = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "run" / "per-expert").eval()
    assert (logits(again) - logits(adapted)).abs().max() > 1e-3  # else it is not to be said


@pytest.mark.parametrize(
    "targets", [EXPERTS[:1], [f"layers.1.mlp.{each}" for each in EXPERTS]], ids=["gate_up", "layer"]
)
def test_adapters_on_some_experts_that_peft_would_stack(targets, tmp_path, capsys):
    run_of(tmp_path, target_parameters=targets)
    assert main(["export-adapter", str(tmp_path / "run"), "--layout", "per-expert"]) == 0
    shown = capsys.readouterr().out
    assert "on this model, whose experts it stacks, but not where only some layers or projections have ad" in shown
    with pytest.warns(UserWarning, match="missing adapter keys"):
        PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "run" / "per-expert")


def test_adapters_of_a_packed_base(tmp_path):
    write_latent_mixture(tmp_path / "base")
    run_of(tmp_path, base=load_packed(str(tmp_path / "base")), target_modules=["q_a_proj", "kv_b_proj"])
    found, tensors, _ = exported(tmp_path)
    assert found.layers == 4 * 3  # the first layer has no experts
    own = load_file(tmp_path / "base" / "model.safetensors")
    for name in tensors:
        assert f"{name.removeprefix('base_model.model.').partition('.lora_')[0]}.weight" in own
    a, b = (
        load_file(tmp_path / "run" / FILE)[f"base_model.model.model.layers.1.mlp.experts.base_layer.lora_{each}.weight"]
        for each in "AB"
    )
    up = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
    assert torch.equal(tensors[f"{up}.lora_A.weight"], a[2 * 4 : 3 * 4])
    assert torch.equal(tensors[f"{up}.lora_B.weight"], b[64:, 2::4])


def test_what_a_run_says_about_its_base_is_exported(tmp_path):
    """Without it, the adapters would be merged into weights that were decoded in another way or dtype."""
    write_mixture(tmp_path / "base")
    adapted = run_of(tmp_path, base=load_packed(str(tmp_path / "base"), dtype=torch.bfloat16))
    write_base_quantization(adapted, tmp_path / "run")
    exported(tmp_path)
    runs = [find_run(str(tmp_path / each)) for each in ("run", "apart")]
    assert runs[0].quantization is not None
    assert runs[1].quantization == runs[0].quantization
    folders = [tmp_path / "of the run", tmp_path / "of the export"]
    for run, folder in zip(runs, folders):
        merge(run, folder, say=lambda line: None)
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(other[name], weight), name


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["export-adapter", *map(str, arguments), "--layout", "per-expert"]) == 2
    return message_of(capsys.readouterr().err)


def test_the_command(tmp_path, capsys):
    run_of(tmp_path, target_parameters=EXPERTS[:1])
    assert main(["export-adapter", str(tmp_path / "run"), "--layout", "per-expert"]) == 0
    folder, shown = tmp_path / "run" / "per-expert", capsys.readouterr().out
    assert "The experts have no adapters on down_proj; vLLM loads experts whose layers all have one." in shown
    assert f"16 linear layers of experts have an adapter of rank 4 each; the folder is {folder}." in shown
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", FILE]
    before = (folder / FILE).read_bytes()
    assert f"`--output_dir` {str(folder)!r} exists and is not an empty folder" in refused(capsys, tmp_path / "run")
    assert (folder / FILE).read_bytes() == before
    assert "are on no stacked experts (`target_parameters`); serve them as they are" in refused(capsys, folder)
    assert "holds a whole model; `export-adapter` takes LoRA" in refused(capsys, tmp_path / "base")
    (tmp_path / "run" / FILE).rename(tmp_path / "run" / "adapter_model.bin")
    assert f"holds no {FILE}; save the adapters again" in refused(capsys, tmp_path / "run", "--output_dir", "new")


@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        ("gpt_oss", {}, "is a gpt_oss, for which transformers knows no names of single experts: its checkpoint has"),
        ("qwen3_moe", {"alpha_pattern": {"q_proj": 4}}, r"have scales of 1 to 2 .`alpha_pattern`.* servers take one"),
        (
            "qwen3_moe",
            {"target_modules": "all-linear", "target_parameters": None, "use_rslora": True},
            "have scales of 4 to 5.65685",
        ),
    ],
)
def test_what_is_refused(family, lora, message, tmp_path):
    run_of(tmp_path, family, **lora)
    with pytest.raises(UserError, match=message):
        exported(tmp_path)
    assert not (tmp_path / "apart").exists()


def test_another_base_is_refused(tmp_path):
    run_of(tmp_path)
    for family, message in (
        (
            "llama",
            r"has no stacked experts by the names of `target_parameters` .*give the model that they were trained",
        ),
        (
            "mixtral",
            r"do not fit their base model .*mixtral.*_A' is \(16, 16\), and the model has a place for \(16, 64\)",
        ),
    ):
        TINY_MODELS[family]().save_pretrained(tmp_path / family)
        with pytest.raises(UserError, match=message):
            export_per_expert(find_run(str(tmp_path / "run"), str(tmp_path / family)), tmp_path / "apart")
