"""Traps that the keys of a recipe and the configuration of its model show; the same with the fix has none."""

import json
from pathlib import Path

import pytest

from liger_trainer.recipe.families import FAMILIES
from liger_trainer.recipe.file import shipped_recipes
from liger_trainer.tools.diagnosis.diagnose import OF_SETTINGS
from liger_trainer.tools.diagnosis.sample import CannotCheckError, read_case
from tests.tools.cli.runs import write_recipe
from tests.tools.diagnosis.recipes import found_in, model_folder, recipe, traps_of

pytestmark = pytest.mark.filterwarnings("ignore")

POLICY = {"trainer": "grpo", "reward_funcs": ["liger_trainer.rewards:accuracy"], "use_vllm": True}
CASES = {
    "dropout where prompts are shared": (
        {**POLICY, "use_vllm": False, "use_peft": True, "lora_target_modules": ["q_proj"], "lora_dropout": 0.05},
        ["--lora_dropout", "0"],
        "`lora_dropout: 0.05` switches `share_prompt` off",
    ),
    "bf16 at a low rate": (
        {"dtype": "bfloat16", "optim": "adamw_torch", "learning_rate": 1e-6},
        ["--optim", "liger_adamw"],
        "rounded away",
    ),
    "LoRA on a tied head": (
        {"tied": True, "use_peft": True, "lora_target_modules": ["q_proj", "lm_head"]},
        ["--lora_target_modules", "all-linear"],
        "`lora_target_modules` puts an adapter on one",
    ),
    "LoRA on a tied embedding": (
        {"tied": True, "use_peft": True, "lora_target_modules": ["q_proj", "embed_tokens"]},
        ["--lora_target_modules", "all-linear"],
        "`lora_target_modules` puts an adapter on one",
    ),
    "a copy of a tied head": (
        {"tied": True, "use_peft": True, "lora_modules_to_save": ["lm_head"]},
        ["--use_peft", "false"],
        "`lora_modules_to_save` trains a copy",
    ),
    "packing without boundaries": (
        {"packing": True, "packing_strategy": "wrapped"},
        ["--packing_strategy", "bfd"],
        "no boundaries",
    ),
    "truncated sampling": ({**POLICY, "top_p": 0.9}, ["--top_p", "1.0"], "`top_p=0.9`: vLLM's"),
    "truncated sampling, without the ratio": (
        {**POLICY, "min_p": 0.1},
        ["--vllm_importance_sampling_correction", "false"],
        "`min_p=0.1`: vLLM's",
    ),
    "two temperatures": (
        {**POLICY, "generation_kwargs": {"temperature": 0.5}},
        ["--temperature", "0.5"],
        "divides the logits by 1.0",
    ),
    "rows behind the positions": ({"max_length": 32769}, ["--max_length", "32768"], "llama has 32768 positions"),
    "answers behind the positions": (
        {**POLICY, "max_completion_length": 32768},
        ["--max_completion_length", "16384"],
        "llama has 32768 positions",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_found_and_gone_with_the_fix(case, tmp_path):
    values, fix, words = CASES[case]
    values = dict(values)
    rows = [{"prompt": "the cat", "solution": "sat"}] if "reward_funcs" in values else None
    model = model_folder(tmp_path / "model", tie_word_embeddings=values.pop("tied", False))
    path = recipe(tmp_path, rows, model=model, **values)
    (trap,) = traps_of(path)
    assert words in trap
    assert "Fix: " in trap
    assert traps_of(path, *fix) == []


def test_an_untied_head_may_be_adapted(tmp_path):
    for key in ("lora_target_modules", "lora_modules_to_save"):
        assert traps_of(recipe(tmp_path, use_peft=True, **{key: ["lm_head"]})) == []


def hybrid(folder, model_type, **config):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    values = {"model_type": model_type, **sizes, **heads, **config}
    return write_recipe(
        Path(folder) / "mine.yaml", {"trainer": "sft", "model_config": values, "packing": True, "dataset_name": "x"}
    )


@pytest.mark.parametrize(
    ("model_type", "config", "words"),
    [
        ("jamba", {"mamba_d_state": 4, "num_experts": 2}, "changes what jamba computes"),
        ("qwen3_next", {}, "qwen3_next"),
        ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}, "lfm2"),
    ],
)
def test_packing_of_layers_with_a_state(model_type, config, words, tmp_path):
    path = hybrid(tmp_path, model_type, **config)
    check = OF_SETTINGS["packing"]
    stock = [] if model_type == "jamba" else ["--use_liger_kernel", "false"]  # there is no kernel for its layers
    (trap,) = check(read_case(path, stock))
    assert words in str(trap)
    assert "`packing: false`" in trap.fix
    assert check(read_case(path, ["--packing", "false"])) == []


@pytest.mark.parametrize(("shared", "traps"), [(2, 1), (0, 0)])
def test_reentrant_checkpoints_of_shared_keys(shared, traps, tmp_path):
    path = hybrid(tmp_path, "gemma4_text", num_kv_shared_layers=shared)
    check = OF_SETTINGS["gradient checkpointing"]
    options = ["--gradient_checkpointing", "true", "--gradient_checkpointing_kwargs"]
    found = check(read_case(path, [*options, '{"use_reentrant": true}']))
    assert len(found) == traps
    assert all("no gradient goes back" in str(trap) and "use_reentrant: false" in trap.fix for trap in found)
    assert check(read_case(path, [*options, '{"use_reentrant": false}'])) == []
    assert check(read_case(path)) == []


_GLM = {**FAMILIES["glm4_moe_lite"], "first_k_dense_replace": 1}
_ADAPTED = ["--use_peft", "true", "--lora_dropout", "0"]
_ATTENTION = ["q_a_proj", "q_b_proj", "o_proj"]


@pytest.mark.parametrize("asked", ["all-linear", [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]])
def test_names_that_are_taken_for_experts(asked, tmp_path):
    path = hybrid(tmp_path, "glm4_moe_lite", **_GLM)
    check = OF_SETTINGS["adapters on experts"]

    def found(names, *options):
        return check(read_case(path, [*_ADAPTED, "--lora_target_modules", *names, *options]))

    (trap,) = found([asked] if isinstance(asked, str) else asked)
    assert "takes down_proj, gate_proj, up_proj of" in str(trap)
    assert found(_ATTENTION) == []
    assert found(_ATTENTION, "--lora_target_parameters", "experts.gate_up_proj", "experts.down_proj") == []


def test_experts_alone_leave_nothing_out(tmp_path):
    path = hybrid(tmp_path, "qwen3_moe", **FAMILIES["qwen3_moe"])
    options = [*_ADAPTED, "--lora_target_modules", "all-linear"]
    assert OF_SETTINGS["adapters on experts"](read_case(path, options)) == []


@pytest.mark.parametrize("kernels", ["true", "false"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_packing_of_attention_has_boundaries(model_type, kernels, tmp_path):
    path = hybrid(tmp_path, model_type)
    assert OF_SETTINGS["packing"](read_case(path, ["--use_liger_kernel", kernels])) == []


def test_a_copy_that_cannot_run_is_not_checked(tmp_path):
    values = {"trainer": "sft", "model_config": {"model_type": "mamba2"}, "packing": True, "dataset_name": "x"}
    path = write_recipe(tmp_path / "mine.yaml", values)  # the small sizes do not agree with each other
    with pytest.raises(CannotCheckError, match=r"could not be run \(layers of the type linear_attention\): unflatten"):
        OF_SETTINGS["packing"](read_case(path))


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 32768),
        ({"rope_type": "yarn", "factor": 4.0}, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 65536),
    ],
)
def test_positions_are_those_of_a_stretched_rotation(rope, positions, tmp_path):
    model = model_folder(tmp_path / "stretched", rope_parameters={"rope_theta": 1e4, **rope})
    check = OF_SETTINGS["positions"]
    assert check(read_case(recipe(tmp_path, model=model, max_length=positions))) == []
    (trap,) = check(read_case(recipe(tmp_path, model=model, max_length=positions + 1)))
    assert f"`max_length: {positions}`" in str(trap)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_no_shipped_recipe_has_a_trap(name):
    case = read_case(name)
    assert [str(trap) for check in OF_SETTINGS.values() for trap in check(case)] == []


def test_a_model_alone_is_tried_with_settings(tmp_path):
    folder = model_folder(tmp_path, tie_word_embeddings=True, eos_token_id=4)
    found = found_in(folder)
    assert found.traps == []
    assert any("With `dtype: bfloat16`" in note for note in found.notes)
    assert any("With `use_peft: True`" in note for note in found.notes)
    assert "no data is named" in found.unchecked["labels"]
    assert not any("use_peft" in note for note in found_in(model_folder(tmp_path)).notes)


def test_a_configuration_alone_has_no_tokenizer(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}))
    found = found_in(str(file))
    assert "packing" in " ".join(found.checked)
    assert any("tokenizer" in reason for reason in found.unchecked.values())


def test_a_recipe_of_a_packed_base_is_checked_without_its_weights(tmp_path):
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = model_folder(tmp_path / "model", quantization_config=quantised)
    adapters = {"use_peft": True, "lora_target_modules": ["q_proj"], "fp8_base": True}
    assert traps_of(recipe(tmp_path, model=model, packed_base=True, **adapters)) == []
