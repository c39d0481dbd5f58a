"""Adapters go on in those that they were trained in: others, or the same scaled otherwise, are refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from liger_trainer.trainers.checkpoints.resuming import CheckpointError, _check_optimizer
from liger_trainer.trainers.checkpoints.same_adapters import differing_adapters
from tests.trainers.builders import causal
from tests.trainers.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore")
WAS = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ONE_MORE = ["o_proj", "q_proj", "v_proj"]
Q_AND_V = "`target_modules` (`lora_target_modules`) is ['q_proj', 'v_proj'] in the checkpoint and "


def trainer_of(folder, max_steps=3, **options):
    config = LoraConfig(**{**WAS, **options})
    return causal(folder, get_peft_model(llama(), config), save_strategy="steps", save_steps=2, max_steps=max_steps)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    trainer_of(folder, max_steps=2).train()
    return folder / "checkpoint-2"


OTHERS = {
    # As many tensors, of other shapes: the optimizer's states would fit by their number.
    "as many targets": ({"target_modules": ["k_proj", "o_proj"]}, Q_AND_V + "['k_proj', 'o_proj'] here"),
    "the same shapes": ({"target_modules": ["k_proj", "v_proj"]}, Q_AND_V + "['k_proj', 'v_proj'] here"),
    "more targets": ({"target_modules": ONE_MORE}, Q_AND_V + f"{ONE_MORE} here"),
    "fewer targets": ({"target_modules": ["q_proj"]}, Q_AND_V + "['q_proj'] here"),
    "another rank": ({"r": 4}, "`r` (`lora_r`) is 2 in the checkpoint and 4 here"),
    "some ranks": ({"rank_pattern": {"q_proj": 4}}, "`rank_pattern` is {} in the checkpoint and {'q_proj': 4} here"),
    "some layers": ({"layers_to_transform": [0]}, "`layers_to_transform` is None in the checkpoint and [0] here"),
    "parameters": (
        {"target_parameters": ["mlp.up_proj.weight"]},
        "`target_parameters` (`lora_target_parameters`) is None in the checkpoint and ['mlp.up_proj.weight'] here",
    ),
    "DoRA": ({"use_dora": True}, "`use_dora` is False in the checkpoint and True here"),
    "a module": (
        {"modules_to_save": ["lm_head"]},
        "`modules_to_save` (`lora_modules_to_save`) is None in the checkpoint and ['lm_head'] here",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_adapters_are_refused(other, checkpoint, tmp_path):
    options, clause = OTHERS[other]
    with pytest.raises(CheckpointError) as raised:
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))
    assert str(raised.value) == (
        f"The adapters in {str(checkpoint)!r} do not fit those of this run: {clause}. Resume with the values of the "
        "checkpoint, or train new adapters in another `output_dir`."
    )


@pytest.mark.parametrize("options", [{"lora_alpha": 99}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}])
def test_the_same_tensors_with_another_scale_are_refused(options, checkpoint, tmp_path):
    (name,) = options
    with pytest.raises(CheckpointError, match=f"do not fit those of this run: `{name}` is .*{options[name]!r} here"):
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("options", [{"target_modules": r".*\.(q|v)_proj"}, {"lora_dropout": 0.5}])
def test_the_same_adapters_in_other_words_go_on(options, checkpoint, tmp_path):
    trainer = trainer_of(tmp_path, **options)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3


def test_what_no_argument_says_is_named_by_a_tensor(checkpoint):
    model = trainer_of(checkpoint.parent).model
    layer = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    layer.lora_A["default"] = nn.Linear(32, 3, bias=False)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert differing_adapters(checkpoint, model).endswith(f"{name!r} is (2, 32) in the checkpoint and (3, 32) here")
    layer.lora_A["default"].weight = nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves it
    assert differing_adapters(checkpoint, model) is None


def test_embeddings_in_the_file_are_no_adapters(tmp_path):
    """PEFT writes them for a vocabulary that was resized, if it can see that it was."""
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.model.save_pretrained(tmp_path / "saved", save_embedding_layers=True)
    assert differing_adapters(tmp_path / "saved", trainer.model) is None
    file = tmp_path / "saved" / "adapter_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in saved.items() if name != "use_rslora"}))
    assert differing_adapters(tmp_path / "saved", trainer.model) is None  # of a PEFT that had no such argument


def test_the_optimizers_states_have_the_shapes_of_the_weights():
    """Also of a whole model of which another run had trained other parts."""
    weights = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    _check_optimizer(optimizer.param_groups, optimizer)
    optimizer.state[weights[1]]["exp_avg"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^its optimizer has a state of \(2, 3\) for a weight of \(4,\)\.$"):
        _check_optimizer(optimizer.param_groups, optimizer)
