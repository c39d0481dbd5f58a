"""Merged models compute what the adapted ones do, for every kind of adapter, and are refused where they do not."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from liger_trainer.errors import UserError
from liger_trainer.tools.export import merging
from liger_trainer.tools.export.merging import MergeError, distances, merge, random_rows
from liger_trainer.tools.export.saved_run import find_run
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import tokenizer
from tests.trainers.vision import PROCESSORS

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
HEAD = ["q_proj", "lm_head"]
TIED = {"tie_word_embeddings": True}
IDS = torch.arange(3, 35)[None]


def saved_run(folder, family="llama", fields=(), task="CAUSAL_LM", base=None, **adapter):
    """A base model and random adapters on it, as a run saves them."""
    base = TINY_MODELS[family](**dict(fields)) if base is None else base
    base.save_pretrained(folder / "base")
    base = type(base).from_pretrained(folder / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, task_type=task, **adapter))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(folder / "run")
    tokenizer().save_pretrained(folder / "run")
    return adapted.eval()


def merged(folder, dtype=None, run="run"):
    lines = []
    return merge(find_run(str(folder / run)), folder / "merged", dtype, lines.append), lines


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize(
    ("family", "fields", "adapter", "tied"),
    [
        ("llama", {}, {"target_modules": "all-linear"}, False),
        ("llama", {}, {"target_modules": "all-linear", "use_dora": True}, False),
        ("llama", {}, {"target_modules": "all-linear", "use_rslora": True}, False),
        ("qwen2", {}, {"target_modules": "all-linear", "bias": "lora_only"}, False),
        ("qwen3_moe", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, False),
        ("gpt_oss", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]}, False),
        ("gemma3", {}, {"target_modules": HEAD}, False),
        ("llama", {}, {"target_modules": HEAD}, False),
        ("llama", TIED, {"target_modules": ["q_proj"]}, True),
        ("llama", TIED, {"target_modules": HEAD}, False),
        ("llama", TIED, {"target_modules": ["q_proj", "embed_tokens"]}, False),
        ("llama", TIED, {"target_modules": HEAD, "ensure_weight_tying": True}, True),
        ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        (
            "llama",
            TIED,
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            True,
        ),
        ("llama", TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, True),
        ("llama", TIED, {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5, 6]}}, False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_merged_is_adapted(family, fields, adapter, tied, tmp_path):
    adapted = saved_run(tmp_path, family, fields, **adapter)
    expected = logits(adapted)
    proof, _ = merged(tmp_path)
    auto = AutoModelForImageTextToText if family == "gemma3" else AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "merged")
    assert type(model) is type(adapted.get_base_model())
    assert distances(expected[0], logits(model)[0]).max() < 1e-5
    assert proof.effect > 1e-3
    assert proof.merged < 1e-5
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert not list(tmp_path.glob("*.unfinished"))


def test_weights_are_rounded_once(tmp_path):
    adapted = saved_run(tmp_path, target_modules="all-linear")
    exact = adapted.merge_and_unload().state_dict()
    proof, _ = merged(tmp_path, torch.bfloat16)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(weight, exact[name].bfloat16()) for name, weight in found.items())
    assert 1e-4 < proof.saved < proof.limit < 0.05
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_reward_model_keeps_its_scores(tmp_path):
    llama = TINY_MODELS["llama"]()
    config = type(llama.config)(**{**llama.config.to_dict(), "num_labels": 1})
    base = AutoModelForSequenceClassification.from_config(config)
    adapted = saved_run(tmp_path, task="SEQ_CLS", base=base, target_modules=["q_proj"])
    llama.save_pretrained(tmp_path / "base")
    proof, _ = merged(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert model.score.weight.shape == (1, 32)
    assert torch.equal(model.score.weight, adapted.base_model.model.score.modules_to_save["default"].weight)
    assert proof.effect > 1e-3


def test_rows_that_were_trained_alone_are_in_the_proof(tmp_path, monkeypatch):
    """Even those of special tokens, which are not drawn."""
    saved_run(tmp_path, target_modules=["q_proj"], trainable_token_indices=[0, 1])
    seen, native = [], merging.logits_of
    monkeypatch.setattr(merging, "logits_of", lambda model, rows: (seen.append(rows), native(model, rows))[1])
    merged(tmp_path)
    assert all(rows[0, :2].tolist() == [0, 1] and not rows[0, 2:].lt(2).any() for rows in seen)


def test_random_rows_are_the_same_at_each_call_and_have_no_special_tokens():
    model = TINY_MODELS["llama"](vocab_size=16)
    model.config.image_token_id, model.config.parts = 5, {"audio_token_index": [6, 7]}
    rows = random_rows(model, {8, 9})
    assert torch.equal(rows, random_rows(model, {8, 9}))
    named = {model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id}
    assert set(rows.flatten().tolist()) == set(range(16)) - {5, 6, 7, 8, 9} - named


def test_an_embedding_that_has_grown(tmp_path):
    """As with a chat template that adds tokens: the base has fewer rows than the adapters' copies."""
    base = TINY_MODELS["llama"]()
    base.save_pretrained(tmp_path / "published")
    base.resize_token_embeddings(140)
    adapted = saved_run(tmp_path, base=base, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    expected = logits(adapted)
    merge(find_run(str(tmp_path / "run"), str(tmp_path / "published")), tmp_path / "merged", say=lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.vocab_size == 140
    assert distances(expected[0], logits(model)[0]).max() < 1e-5


@pytest.mark.parametrize("trained", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_an_embedding_that_has_grown_in_memory(trained, tmp_path):
    """PEFT, which sees the base with fewer rows, writes what was trained twice."""
    TINY_MODELS["llama"]().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(140, mean_resizing=False)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=trained))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05)
    adapted.save_pretrained(tmp_path / "run")
    assert any(".modules_to_save." in name for name in load_file(tmp_path / "run" / "adapter_model.safetensors"))
    merge(find_run(str(tmp_path / "run")), tmp_path / "merged", say=lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.vocab_size == 140
    assert distances(logits(adapted.eval())[0], logits(model)[0]).max() < 1e-5


def test_tokenizer_and_generation_config(tmp_path):
    base = TINY_MODELS["llama"](pad_token_id=None)
    saved_run(tmp_path, base=base, target_modules=["q_proj"])
    published = {"eos_token_id": 99, "top_k": 7}  # `top_k` without `do_sample`, which transformers refuses to write
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(published))
    merged(tmp_path)
    saved = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert saved["top_k"] == 7
    assert saved["eos_token_id"] == [tokenizer().eos_token_id, 99]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["pad_token_id"] == tokenizer().pad_token_id
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == (tmp_path / "run" / "tokenizer.json").read_text()


def test_the_processor_of_the_base(tmp_path):
    """The run has trained on text alone, and has saved the tokenizer only."""
    saved_run(tmp_path, "gemma3", target_modules=["q_proj"])
    PROCESSORS["gemma3"]().save_pretrained(tmp_path / "base")
    merged(tmp_path)
    name = "processor_config.json"
    assert (tmp_path / "merged" / name).read_text() == (tmp_path / "base" / name).read_text()
    pictures = AutoImageProcessor.from_pretrained(tmp_path / "merged")
    assert (pictures.size["height"], pictures.size["width"]) == (16, 16)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer().chat_template


def test_a_full_disk(tmp_path, monkeypatch):
    saved_run(tmp_path, target_modules=["q_proj"])

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(merging, "_check_saved", full)
    assert "could not be written: [Errno 28] No space left on device" in refused(tmp_path, UserError)


def test_the_run_may_have_moved_with_its_new_base(tmp_path):
    saved_run(tmp_path, target_modules=["q_proj"])
    (tmp_path / "base").rename(tmp_path / "run" / "initial_model")
    path = tmp_path / "run" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "base_model_name_or_path": "/elsewhere/initial_model"}))
    merged(tmp_path)
    path.write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="name no base model; give it with `--base_model`"):
        find_run(str(tmp_path / "run"))


def refused(folder, error=MergeError, dtype=None):
    with pytest.raises(error) as caught:
        merged(folder, dtype)
    assert not (folder / "merged").exists()
    assert not (folder / "merged.unfinished").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_merge_is_an_error(tmp_path, monkeypatch):
    """PEFT's own merge of a tied head."""
    saved_run(tmp_path, "llama", TIED, target_modules=HEAD)
    monkeypatch.setattr(merging, "_untie", lambda base: None)
    assert "The merged model is not the adapted one" in refused(tmp_path)


def test_one_wrong_expert_is_an_error(tmp_path, monkeypatch):
    saved_run(tmp_path, "qwen3_moe", target_modules=["q_proj"], target_parameters=EXPERTS)
    whole = merging.merged_model

    def with_one_expert_wrong(adapted):
        model = whole(adapted)
        model.model.layers[1].mlp.experts.down_proj.data[3] *= 1.01
        return model

    monkeypatch.setattr(merging, "merged_model", with_one_expert_wrong)
    assert "The merged model is not the adapted one" in refused(tmp_path)


def test_a_model_that_is_saved_wrong_is_an_error(tmp_path, monkeypatch):
    saved_run(tmp_path, target_modules=["q_proj"])
    native = merging._round

    def with_another_head(model, dtype):
        native(model, dtype)
        wrong = nn.Linear(32, 128, bias=False)
        model.save_pretrained = lambda folder: (
            setattr(model, "lm_head", wrong),
            type(model).save_pretrained(model, folder),
            setattr(model, "lm_head", head),
        )
        head = model.lm_head

    monkeypatch.setattr(merging, "_round", with_another_head)
    assert "1 weights differ, such as lm_head.weight" in refused(tmp_path)


def test_a_saved_configuration_that_computes_something_else_is_an_error(tmp_path, monkeypatch):
    saved_run(tmp_path, target_modules=["q_proj"])
    native = merging._round

    def with_another_activation(model, dtype):
        native(model, dtype)
        model.config.hidden_act = "relu"

    monkeypatch.setattr(merging, "_round", with_another_activation)
    assert "The saved model is not the adapted one" in refused(tmp_path)


def test_weights_beyond_the_dtype(tmp_path):
    base = TINY_MODELS["llama"]()
    base.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5
    saved_run(tmp_path, base=base, target_modules=["q_proj"])
    assert "up_proj.weight has values that are not finite in float16" in refused(tmp_path, dtype=torch.float16)


def test_adapters_that_have_no_weights_to_merge(tmp_path):
    base = TINY_MODELS["llama"]()
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).save_pretrained(
        tmp_path / "run"
    )
    assert "holds adapters of the kind PROMPT_TUNING, and nothing that could be added" in refused(tmp_path)


@pytest.mark.parametrize("has_bias", [True, False])
def test_biases_of_adapters(has_bias, tmp_path):
    adapted = saved_run(tmp_path, fields={"attention_bias": has_bias}, target_modules=["q_proj"], lora_bias=True)
    if not has_bias:
        assert "`lora_bias` is true in the adapters, and 'model.layers.0.self_attn.q_proj' has no" in refused(tmp_path)
        return
    merged(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert distances(logits(adapted)[0], logits(model)[0]).max() < 1e-5


@pytest.mark.parametrize("layers", [1, 3])
def test_adapters_of_another_model(layers, tmp_path):
    saved_run(tmp_path, target_modules=["q_proj"])
    TINY_MODELS["llama"](num_hidden_layers=layers).save_pretrained(tmp_path / "base")
    message = refused(tmp_path, UserError)
    assert "do not fit their base model" in message
    assert "`--base_model`" in message


def test_damaged_adapters(tmp_path):
    saved_run(tmp_path, target_modules=["q_proj"])
    file = tmp_path / "run" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "is damaged" in refused(tmp_path, UserError)


def test_adapters_that_are_not_finite(tmp_path):
    saved_run(tmp_path, target_modules=["q_proj"])
    file = tmp_path / "run" / "adapter_model.safetensors"
    save_file({name: weight * float("nan") for name, weight in load_file(file).items()}, file)
    assert "differ by nan" in refused(tmp_path)


def test_an_interrupted_merge_is_noticed(tmp_path):
    saved_run(tmp_path, target_modules=["q_proj"])
    (tmp_path / "merged.unfinished").mkdir()
    with pytest.raises(UserError, match="left of a command that was interrupted, or that is running; delete it"):
        merged(tmp_path)
    assert (tmp_path / "merged.unfinished").is_dir()
