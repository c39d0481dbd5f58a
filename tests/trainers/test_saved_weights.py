"""What a save holds is what was trained, and the best model is what was best."""

import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    get_peft_model,
    load_peft_weights,
)
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import StateDictType

import liger_trainer
from liger_trainer.trainers.checkpoints.saved_weights import SavedWeightsError
from liger_trainer.trainers.checks.launch import check_saves_on_each_host
from tests.tiny_models import TINY_MODELS
from tests.trainers.builders import causal, sft
from tests.trainers.tiny import COMMON, WORDS, llama, token_rows, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = ["q_proj", "up_proj"]
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}


def lora(**options):
    return LoraConfig(r=2, target_modules=LAYERS, **options)


ADAPTERS = {
    "LoRA": lora(),
    "DoRA": lora(use_dora=True),
    "copied head": lora(modules_to_save=["lm_head"]),
    "biases": lora(bias="all", lora_bias=True),
    "tokens": lora(trainable_token_indices=[3, 4]),
    "embedding": LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "weights": LoraConfig(r=2, target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "AdaLoRA": AdaLoraConfig(target_modules=LAYERS, total_step=20, tinit=1, tfinal=1),
    "tokens alone": TrainableTokensConfig(token_indices=[3, 4]),
    "VB-LoRA": VBLoRAConfig(r=2, num_vectors=8, vector_length=8, target_modules=LAYERS, save_only_topk_weights=True),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_all_that_peft_saves_is_accepted(kind, tmp_path):
    torch.manual_seed(1)
    trainer = causal(tmp_path, get_peft_model(llama(), ADAPTERS[kind]), **SAVING)
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").is_file()


def with_two_adapters():
    model = get_peft_model(llama(), lora())
    model.add_adapter("mlp", lora())
    return model


def with_tokens(first, second, names=("default", "mine")):
    model = get_peft_model(llama(), lora(**first), adapter_name=names[0])
    model.add_adapter(names[1], lora(**second))
    return model


TOKENS = {"trainable_token_indices": [3]}


@pytest.mark.parametrize(
    ("first", "second", "names", "named"),
    [
        (TOKENS, {}, ("default", "mine"), "mine"),
        ({}, TOKENS, ("default", "mine"), "default"),
        (TOKENS, TOKENS, ("default", "embed_tokens"), "default"),
    ],
)
def test_adapters_of_which_one_trains_tokens(first, second, names, named, tmp_path, caplog):
    """PEFT raises a KeyError when it saves them."""
    model = with_tokens(first, second, names)
    match = rf"cannot save the adapter '{named}' beside the others: it looks for its 'token_adapter\.trainable_tokens"
    with pytest.raises(SavedWeightsError, match=match):
        causal(tmp_path, model, save_strategy="steps")
    with pytest.raises(KeyError, match="trainable_tokens_delta"):
        model.save_pretrained(tmp_path / "saved")
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        causal(tmp_path, model, max_steps=1).train()  # nothing is saved
    assert f"cannot save the adapter '{named}'" in caplog.text


def test_adapters_that_both_train_tokens(tmp_path):
    causal(tmp_path, with_tokens(TOKENS, {"trainable_token_indices": [4, 5]}), **SAVING).train()


def with_a_trained_head():
    model = get_peft_model(llama(), lora())
    model.get_base_model().lm_head.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (with_two_adapters, r"4 of 8 trained tensors .* The adapter 'mlp' is called as a module"),
        (with_a_trained_head, r"1 of 9 trained tensors .*lm_head\.weight'\. Train them as part of the adapters"),
    ],
)
def test_what_peft_would_leave_out(build, match, tmp_path, caplog):
    with pytest.raises(SavedWeightsError, match=match):
        causal(tmp_path, build(), save_strategy="steps")
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        causal(tmp_path, build())  # nothing is saved
    assert "trained tensors would be in no checkpoint" in caplog.text


@pytest.mark.parametrize("adapted", [True, False])
def test_a_file_that_lacks_a_tensor(adapted, tmp_path, monkeypatch):
    """Such as by a `save_pretrained` of the user's own."""
    model = get_peft_model(llama(), lora(), adapter_name="mine") if adapted else llama()
    trainer = causal(tmp_path, model, max_steps=1)
    trainer.train()
    trainer.save_model()
    save = type(model).save_pretrained

    def without_one(self, folder, *args, **kwargs):
        save(self, folder, *args, **kwargs)
        file = next(path for path in (tmp_path / "again").rglob("*.safetensors"))
        tensors = load_file(file)
        tensors.pop(next(name for name in sorted(tensors) if "q_proj" in name))
        save_file(tensors, file)

    monkeypatch.setattr(type(model), "save_pretrained", without_one)
    number = "8" if adapted else "21"
    with pytest.raises(SavedWeightsError, match=rf"lacks 1 of {number} trained tensors, such as '.*q_proj"):
        trainer.save_model(str(tmp_path / "again"))


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_models_that_are_saved_under_other_names(family, tmp_path):
    """A mixture of experts expert by expert, and a tied head not at all."""
    trainer = causal(tmp_path, TINY_MODELS[family](), **SAVING)
    trainer.train()
    trainer.save_model(str(tmp_path / "again"))


@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_best_adapter_is_loaded_whatever_its_name(name, tmp_path):
    torch.manual_seed(4)
    model = get_peft_model(llama(), lora(), adapter_name=name)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    settings = {**best, "save_steps": 1, "max_steps": 3, "learning_rate": 1.0}
    trainer = causal(tmp_path, model, eval_dataset=token_rows(n=4), **settings)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses[2] > min(losses)  # otherwise the last is the best
    folder = tmp_path / f"checkpoint-{losses.index(min(losses)) + 1}"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)
    saved = load_peft_weights(str(folder if name == "default" else folder / name))
    weights = dict(model.named_parameters())
    for key, value in saved.items():
        assert torch.equal(weights[key.replace(".weight", f".{name}.weight")], value)
    assert all(weights[key.replace(".weight", f".{name}.weight")].requires_grad for key in saved)


# Weights that no checkpoint held


def reward(folder, tmp_path, adapters):
    rows = [{"chosen": WORDS[i % 4], "rejected": WORDS[(i + 1) % 4]} for i in range(8)]
    args = liger_trainer.LigerRewardConfig(str(tmp_path), **COMMON, bf16=False)
    data = Dataset.from_list(rows)
    return liger_trainer.LigerRewardTrainer(
        folder, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapters
    )


@pytest.mark.parametrize(
    ("adapters", "named"),
    [
        (lora(), True),
        (lora(task_type="SEQ_CLS"), False),
        (lora(modules_to_save=["score"]), False),
        (None, False),
    ],
)
def test_the_new_head_of_a_reward_model(adapters, named, folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        reward(folder, tmp_path, adapters)
    said = "The model's checkpoint had no" in caplog.text
    assert said is named
    if named:
        assert "score.weight" in caplog.text
        assert "`modules_to_save=['score']`" in caplog.text


@pytest.mark.parametrize("adapters", [lora(), lora(modules_to_save=["lm_head"]), lora(trainable_token_indices=[3])])
def test_a_model_that_was_loaded_whole_says_nothing(adapters, folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        sft(tmp_path, folder, peft_config=adapters)
        sft(tmp_path, llama(), peft_config=adapters)  # built from a configuration
    assert "checkpoint had no" not in caplog.text


def test_a_model_whose_checkpoints_are_in_shards_is_saved_whole(tmp_path, monkeypatch):
    """With what accelerate would gather; `tests/distributed` has processes and shards."""
    trainer = causal(tmp_path, max_steps=1)
    plugin = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(trainer.accelerator, "state", SimpleNamespace(fsdp_plugin=plugin))
    monkeypatch.setattr(trainer.accelerator, "get_state_dict", lambda model: model.state_dict())
    trainer.save_model(str(tmp_path / "checkpoint"), _internal_call=True)
    assert not (tmp_path / "checkpoint" / "model.safetensors").exists()
    trainer.save_model(str(tmp_path / "model"))
    assert load_file(tmp_path / "model" / "model.safetensors")
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT


@pytest.mark.parametrize("changed", ["", "one host", "a shared folder", "no checkpoints", "whole"])
def test_hosts_that_hold_a_model_together_save_no_parts_of_their_own(changed, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4" if changed == "one host" else "2")
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            world_size=4,
            save_on_each_node=changed != "a shared folder",
            save_strategy="no" if changed == "no checkpoints" else "steps",
        ),
        is_fsdp_enabled=changed != "whole",
        is_distributed_loading_by_transformers=False,
    )
    if changed:
        check_saves_on_each_host(trainer)
    else:
        with pytest.raises(ValueError, match="`save_on_each_node` is true, but the hosts hold the model together"):
            check_saves_on_each_host(trainer)
