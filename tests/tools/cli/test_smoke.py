"""Every recipe, and a recipe of every family, runs its few offline steps on a tiny model."""

import importlib.util
import json
from pathlib import Path

import pytest

from liger_trainer.patching.moe import experts_formula
from liger_trainer.patching.moe.experts import SIZES
from liger_trainer.recipe import families, load_recipe, smoke
from liger_trainer.recipe.file import RecipeError, find_recipe, read_recipe, shipped_recipes
from liger_trainer.recipe.run import run_recipe
from liger_trainer.tools.cli import main
from tests.quantised import library
from tests.tools.cli.runs import refused, state, write_recipe

QWEN = {"model_name_or_path": "Qwen/Qwen3-8B"}
# A smoke run is one process: of the recipes for several GPUs one shows that, the others are those without their suffix.
_SPREAD = {name for name in shipped_recipes() if name.endswith(("_fsdp2", "_zero3"))} - {"llama3_8b_sft_fsdp2"}


@pytest.mark.parametrize("name", sorted(set(shipped_recipes()) - _SPREAD))
def test_every_shipped_recipe(name, tmp_path, capsys, caplog, monkeypatch):
    folder, experts, native = tmp_path / "run", set(), experts_formula.moe_experts

    def noted(hidden, *others, **options):
        if hidden.shape[-1] != SIZES[0]:  # the proof's
            experts.add("adapted" if options["gate_up_adapters"] else "plain")
        return native(hidden, *others, **options)

    monkeypatch.setattr(experts_formula, "moe_experts", noted)
    assert main(["train", name, "--smoke", "--output_dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert shown.count("liger_trainer kernels in") == 1  # of a warm start too
    assert "lora_target_modules" not in caplog.text
    given = read_recipe(find_recipe(name))
    assert ("evaluation" in shown) == (given.get("eval_strategy", "no") != "no")
    assert {"grpo": "mean reward", "kto": "reward margin", "sft": "", "causal_lm": ""}.get(
        given["trainer"], "preference acc."
    ) in shown
    assert (folder / "loss_curve.png").stat().st_size > 1000
    assert "<h2>Curves</h2>" in (folder / "report.html").read_text(encoding="utf-8")
    assert state(folder)["global_step"] == smoke.STEPS
    steps = [entry for entry in state(folder)["log_history"] if "loss" in entry]
    assert len(steps) == smoke.STEPS
    assert all(entry["loss"] == entry["loss"] and entry["grad_norm"] > 0 for entry in steps)
    saved = "adapter_model.safetensors" if given.get("use_peft") else "model.safetensors"
    assert (folder / saved).is_file()
    of_a_mixture = {"adapted" if name.endswith(("sft_lora", "sft_qlora")) else "plain"}
    mixtures = ("qwen3_30b_a3b", "gpt_oss", "glm_4_7_flash", "qwen3_5_35b_a3b", "nemotron", "granite")
    assert experts == (of_a_mixture if name.startswith(mixtures) else set())


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        (  # PEFT trains the parameters that it finds, and warns at most
            "qwen3_30b_a3b_sft_lora",
            ["--lora_target_parameters", "experts.gate_up_proj", "experts.dwon_proj"],
            "ends in 'experts.dwon_proj'; give ends of names",
        ),
        (  # the recipe's `router_aux_loss_coef` is 0, with which TRL does not ask for the routers' logits
            "qwen3_30b_a3b_sft",
            ["--router_z_loss_coef", "0.001"],
            "Set `router_aux_loss_coef`, which is 0.0, above 0",
        ),
        (
            "llama3_8b_sft",
            ["--router_balance", "true"],
            "`router_balance` is true, but LlamaForCausalLM has no experts",
        ),
        ("quickstart", ["--model_config", "{bad"], "`model_config` is '{bad', which is not JSON"),
    ],
)
def test_smoke_runs_that_are_refused(recipe, options, words, tmp_path, capsys):
    assert words in refused(capsys, recipe, "--smoke", "--output_dir", str(tmp_path / "run"), *options)


def test_the_families_of_glm_are_told_apart():
    names = {"zai-org/GLM-4-9B-0414": "glm4", "zai-org/GLM-4.7-Flash": "glm4_moe_lite"}
    assert {name: families.family_of({"model_name_or_path": name}) for name in names} == names
    with pytest.raises(RecipeError, match=r"cannot find the family of .* 'zai-org/GLM-4\.6' offline"):
        families.family_of({"model_name_or_path": "zai-org/GLM-4.6"})


def test_a_smoke_run_says_what_it_leaves_out(tmp_path, caplog, monkeypatch):
    """On a CPU, bitsandbytes' weights cannot be trained after an evaluation."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    options = ["--output_dir", str(tmp_path / "run")]
    recipe = load_recipe(find_recipe("llama3_8b_sft_qlora"), options, smoke=True)
    assert recipe.model.use_peft
    assert not recipe.model.load_in_4bit
    assert "ignores `load_in_4bit`" in caplog.text


@pytest.mark.parametrize("trainer", ["sft", "causal_lm"])
def test_a_new_model_in_4_bits(trainer, tmp_path):
    library()
    folder, values = tmp_path / "run", {**QWEN, "trainer": trainer, "eval_strategy": "no", "use_peft": True}
    values |= {"lora_target_modules": "all-linear", "load_in_4bit": True, "use_bnb_nested_quant": True}
    recipe = write_recipe(tmp_path / "mine.yaml", values)
    options = ["--output_dir", str(folder), "--load_in_4bit", "true"]
    trained = run_recipe(load_recipe(recipe, options, smoke=True))
    kinds = {type(module).__name__ for module in trained.model.modules()}
    assert "Linear4bit" in kinds
    assert all(entry["loss"] == entry["loss"] for entry in trained.state.log_history if "loss" in entry)
    assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_bitsandbytes_is_not_installed(key, tmp_path, monkeypatch, capsys):
    native = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else native(name, *rest)
    )
    options = ["--output_dir", str(tmp_path / "run"), "--use_peft", "true", f"--{key}", "true"]
    message = refused(capsys, "quickstart", *options)
    assert f"`{key}: true` needs bitsandbytes, which is not installed" in message
    assert "pip install 'liger-trainer[qlora]'" in message


@pytest.mark.parametrize("trainer", ["rloo", "reward"])
@pytest.mark.parametrize("use_peft", ["false", "true"])
def test_trainers_without_a_shipped_recipe(trainer, use_peft, tmp_path):
    folder, values = tmp_path / "run", {**QWEN, "trainer": trainer}
    if trainer == "rloo":
        values |= {"reward_funcs": ["someone/reward-model", "liger_trainer.rewards:format"], "reward_weights": [1, 2]}
    recipe = write_recipe(tmp_path / "mine.yaml", values)
    assert main(["train", recipe, "--smoke", "--output_dir", str(folder), "--use_peft", use_peft]) == 0
    saved = "adapter_model.safetensors" if use_peft == "true" else "model.safetensors"
    assert (folder / saved).is_file()
    assert {"rloo": "rewards/format/mean", "reward": "accuracy"}[trainer] in state(folder)["log_history"][0]


def one_step(folder, family, *options):
    """Trains a model whose family does not follow from its name."""
    values = {"model_name_or_path": "someone/their-model", "model_family": family, "model_revision": "v2"}
    recipe = write_recipe(folder.with_suffix(".yaml"), {**values, "save_strategy": "no", "loss_curve": False})
    assert main(["train", recipe, "--smoke", "--max_steps", "1", "--output_dir", str(folder), *options]) == 0


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family(family, tmp_path):
    one_step(tmp_path / "run", family)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model_type"] in (family, f"{family}_text")


def test_balance_of_the_routers(tmp_path):
    folder = tmp_path / "run"
    one_step(folder, "qwen3_moe", "--router_balance", "true", "--router_z_loss_coef", "0.01")
    first = state(folder)["log_history"][0]
    assert first["router_z_loss"] > 0
    assert 0 < first["router/entropy_percent"] <= 100
    assert (folder / "router_balance.png").stat().st_size > 1000
    assert "expert_0" in (folder / "router_balance.csv").read_text()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Llama-3.2-1B", "llama"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3_moe"),
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen2.5-7B", "qwen2"),
        ("google/gemma-3-1b-pt", "gemma3_text"),
        ("google/gemma-3-12b-it", "gemma3"),
        ("google/gemma-2-9b", "gemma2"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral"),
        ("openai/gpt-oss-20b", "gpt_oss"),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("Qwen/Qwen3.5-4B", "qwen3_5"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h"),
        ("ibm-granite/granite-4.0-h-tiny", "granitemoehybrid"),
        ("ibm-granite/granite-3.3-8b-instruct", "granite"),
        ("LiquidAI/LFM2-1.2B", "lfm2"),
        ("google/gemma-4-E4B", "gemma4"),
    ],
)
def test_family_from_the_id(name, family):
    assert families.family_of({"model_name_or_path": name}) == family


def test_family_from_a_local_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    assert families.family_of({"model_name_or_path": str(tmp_path)}) == "olmo2"


def test_unknown_family_says_what_to_set():
    with pytest.raises(RecipeError, match="set `model_family`"):
        families.family_of({"model_name_or_path": "someone/else"})
    with pytest.raises(RecipeError, match="Did you mean 'qwen3_moe'"):
        families.family_of({"model_family": "qwen3moe"})


def test_the_command_line_stays(tmp_path):
    recipe = load_recipe("llama3_8b_sft", ["--max_steps", "5", "--output_dir", str(tmp_path)], smoke=True)
    assert recipe.training.max_steps == 5
    assert recipe.training.output_dir == str(tmp_path)
    assert recipe.training.max_length == 64
    assert recipe.model.model_name_or_path is None


def test_a_model_or_data_of_the_command_line_stays(tmp_path):
    model = smoke.smoke_model(tmp_path / "model")
    recipe = load_recipe("llama3_8b_sft", ["--model_name_or_path", model], smoke=True)
    assert (recipe.model.model_name_or_path, recipe.recipe.model_config) == (model, None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in smoke.smoke_data("messages")))
    options = ["--model_name_or_path", model, "--data_files", str(file), "--output_dir", str(tmp_path / "run")]
    assert main(["train", "llama3_8b_sft", "--smoke", "--max_steps", "1", *options]) == 0
    assert load_recipe("llama3_8b_sft", ["--datasets", "some/data"], smoke=True).data.dataset_name is None


def test_a_template_for_other_columns_is_left_out(tmp_path):
    path = write_recipe(tmp_path / "mine.yaml", {**QWEN, "prompt_template": "{question} Answer:"})
    assert main(["train", path, "--smoke", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]) == 0


def test_completion_only_recipes_get_completions(tmp_path):
    path = write_recipe(tmp_path / "mine.yaml", {**QWEN, "completion_only_loss": True})
    assert load_recipe(path, smoke=True).data.dataset_name == "smoke_completion"
    assert main(["train", path, "--smoke", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]) == 0


def test_two_smoke_runs_use_two_folders():
    first, second = (load_recipe("quickstart", smoke=True).training.output_dir for _ in range(2))
    assert first != second
    for folder in (first, second):
        Path(folder).rmdir()


def test_a_warm_start_is_shrunk_too(tmp_path):
    recipe = load_recipe("quickstart_dpo", ["--output_dir", str(tmp_path)], smoke=True)
    assert recipe.warm_start.training.max_steps == smoke.STEPS
    assert recipe.warm_start.data.dataset_name == "smoke_messages"
    assert Path(recipe.warm_start.training.output_dir) == tmp_path / "warm_start"


@pytest.mark.parametrize(("own", "optim"), [({}, "liger_adamw"), ({"optim": "sgd"}, "sgd")])
def test_a_warm_start_has_the_optimizer_of_the_recipe(tmp_path, own, optim):
    values = read_recipe(find_recipe("quickstart_dpo"))
    values |= {"optim": "liger_adamw", "optim_args": "states=bf16", "warm_start": {**values["warm_start"], **own}}
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", values), [])
    assert recipe.warm_start.training.optim == optim
    assert recipe.warm_start.training.optim_args == (None if own else "states=bf16")


def test_a_recipe_that_fills_the_gpu(tmp_path, capsys):
    values = {**read_recipe(find_recipe("llama3_8b_sft")), "activation_memory": "auto"}
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    options = ["--smoke", "--output_dir", str(tmp_path / "run"), "--max_steps", "5"]
    assert main(["train", recipe, *options]) == 0
    assert "activation_memory: 2 of 2 layers keep " in capsys.readouterr().out


def test_a_recipe_that_runs_from_cuda_graphs(tmp_path, capsys):
    values = {**read_recipe(find_recipe("llama3_8b_sft")), "cuda_graphs": True}
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    assert main(["train", recipe, "--smoke", "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]) == 0
    said = capsys.readouterr()
    assert "cuda_graphs" not in said.out + said.err  # as little as of `bf16`, which a smoke run on a CPU sets too


def test_the_new_model_is_not_packed(tmp_path, caplog):
    options = ["--packed_base", "true", "--output_dir", str(tmp_path / "run")]
    recipe = load_recipe(find_recipe("qwen3_8b_fp8_sft_lora"), options, smoke=True)
    assert recipe.training.packed_base == "auto"
    assert "ignores `packed_base`: its model is new" in caplog.text
    run_recipe(recipe)
