"""Every shipped recipe parses as YAML and as Python to the same values, and every key of it is known."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from liger_trainer.configs.flags import cuda_graphs_of
from liger_trainer.recipe import build_recipe, load_recipe
from liger_trainer.recipe.build import chat_template
from liger_trainer.recipe.file import LAUNCH_LINE, RecipeError, find_recipe, read_recipe, shipped_recipes
from liger_trainer.recipe.load import check_values
from liger_trainer.recipe.model import attention, check_model, load_model, model_kwargs
from liger_trainer.recipe.run import run_recipe
from tests.low_bit import write_mxfp4

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
WORDS = {"true": True, "false": False, "null": None}


def python_values(text: str) -> dict:
    """The recipe's annotations, evaluated the way Python does."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            found[node.target.id] = eval(compile(ast.Expression(node.annotation), "recipe", "eval"), {}, dict(WORDS))
    return found


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def minimal(tmp_path: Path, **changes):
    values = {"trainer": "causal_lm", "model_config": {"model_type": "llama"}, "use_cpu": True, "dataset_name": "x"}
    return load_recipe(write(tmp_path, json.dumps({**values, **changes})))


QUANTISED = ("sft_lora", "sft_qlora", "dpo_qlora")


def test_all_shipped_recipes_are_found():
    methods = ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "dpo_lora", "grpo_lora", "sft_fsdp2", "sft_zero3")
    families = ("llama3_8b", "qwen3_30b_a3b", "gemma3_4b")
    small = {"smollm2_135m": ("sft", "dpo"), "qwen3_0_6b": ("sft",), "qwen3_4b": ("sft_qlora",), "qwen3_8b": ("sft",)}
    adapted = ("sft_lora", "dpo_lora", "grpo_lora")
    ungated = {f"{family}_{method}" for family, methods in small.items() for method in methods}
    ungated |= {f"{family}_{method}" for family in small if family != "smollm2_135m" for method in adapted}
    ungated |= {"smollm2_135m_sft_fp16", "qwen3_0_6b_sft_lora_fp16", "qwen3_vl_4b_sft_lora", "gpt_oss_20b_sft_lora"}
    ungated |= {f"qwen3_5_9b_{method}" for method in ("sft", *adapted)}
    ungated |= {f"{family}_{method}" for family in ("qwen3_5_35b_a3b", "nemotron_3_nano") for method in adapted}
    ungated |= {f"lfm2_2_6b_{method}" for method in ("sft", *adapted)}
    ungated |= {f"granite_4_h_small_{method}" for method in ("sft_lora", "dpo_lora")}
    ungated |= {"qwen3_8b_fp8_sft_lora", "qwen3_30b_a3b_fp8_sft_lora", "qwen3_5_35b_a3b_fp8_sft_lora"}
    ungated |= {"glm_4_7_flash_fp8_sft_lora"}
    ungated |= {"gemma4_e2b_sft_lora", "gemma4_e4b_sft_lora", "gemma4_e4b_dpo_lora"}
    quickstarts = {"quickstart", "quickstart_dpo", "quickstart_grpo"}
    quantised = {f"{family}_{method}" for family in ("llama3_8b", "gemma3_4b") for method in QUANTISED}
    experts = {f"qwen3_30b_a3b_sft_{method}" for method in ("lora", "qlora", "ep")}
    assert set(NAMES) == quickstarts | ungated | quantised | experts | {
        f"{family}_{method}" for family in families for method in methods
    }
    assert sorted(shipped_recipes()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipe_means_the_same_as_yaml_and_as_python(name):
    path = ROOT / "recipes" / f"{name}.yaml"
    text = path.read_text()
    values = read_recipe(path)
    assert values == python_values(text)
    # One key more for YAML: the launch line, which must stand before every annotation.
    raw = yaml.safe_load(text)
    assert len(raw) == len(values) + 1
    assert next(iter(raw)) == LAUNCH_LINE.removesuffix(": pass")
    assert raw[next(iter(raw))] == "pass"
    launch = [line for line in text.splitlines() if line.startswith(LAUNCH_LINE)]
    assert len(launch) == 1
    assert len(launch[0]) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_recipe_executed_by_a_spawned_worker_runs_nothing(name):
    path = ROOT / "recipes" / f"{name}.yaml"
    namespace = {"__name__": "__mp_main__", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    assert namespace["true"] is True
    assert namespace["null"] is None


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_known_and_the_arguments_are_accepted(name):
    path = ROOT / "recipes" / f"{name}.yaml"
    values, given = check_values(read_recipe(path), [], path)
    assert given == set()
    values.update(use_cpu=True, bf16=False)  # the recipe asks for a GPU
    recipe = build_recipe(values, path)
    for key, value in read_recipe(path).items():
        if key in ("bf16", "report_to"):
            continue
        owners = [recipe.recipe, recipe.data, recipe.mixture, recipe.model, recipe.training]
        owners += [recipe.more] if recipe.more else []
        # TRL makes one LoRA target, a pattern, of a list that holds one.
        accepted = [value, value[0]] if key == "lora_target_modules" and len(value) == 1 else [value]
        assert any(getattr(owner, key, object()) in accepted for owner in owners), key


def test_command_line_wins_over_the_file(tmp_path):
    path = write(tmp_path, "trainer: causal_lm\nlearning_rate: 1e-5\nmax_steps: 7\ntf32: null\nuse_cpu: true\n")
    recipe = load_recipe(path, ["--max_steps", "9", "--logging-steps=3"])
    assert recipe.training.learning_rate == 1e-5  # YAML reads 1e-5 as text; the field makes it a number
    assert recipe.training.max_steps == 9
    assert recipe.training.logging_steps == 3


def test_null_on_the_command_line_unsets_what_the_file_sets(tmp_path):
    path = write(tmp_path, "trainer: causal_lm\nfp8: rowwise\nactivation_memory: 1GiB\nuse_cpu: true\nmax_steps: 2\n")
    recipe = load_recipe(path, ["--fp8", "null", "--activation-memory=null", "--run_name=a=null"])
    assert [recipe.training.fp8, recipe.training.activation_memory] == [None, None]
    assert recipe.training.run_name == "a=null"
    with pytest.raises(RecipeError, match="invalid int value: 'null'"):
        load_recipe(path, ["--max_steps", "null"])


def test_switching_evaluation_off_switches_off_the_first_one_too():
    assert load_recipe("quickstart", ["--use_cpu", "true"]).training.eval_on_start
    assert not load_recipe("quickstart", ["--use_cpu", "true", "--eval_strategy", "no"]).training.eval_on_start


def test_block_style_yaml_is_a_recipe_too(tmp_path):
    path = write(
        tmp_path,
        "trainer: sft\nuse_cpu: true\nbf16: false\nlora_target_modules:\n  - q_proj\n  - v_proj\n"
        "liger_kernel_config:\n  rms_norm: false\nlogits_memory: 1048576\ndata_files: one.jsonl\n",
    )
    recipe = load_recipe(path)
    assert recipe.model.lora_target_modules == ["q_proj", "v_proj"]
    assert recipe.training.liger_kernel_config == {"rms_norm": False}
    assert recipe.training.kernel_config().logits_memory == 1 << 20
    assert recipe.recipe.data_files == ["one.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_chat_templates_are_shipped_by_trl_and_mark_the_assistant(name):
    """``--smoke`` brings its own template, so that a wrong name would only show in the real run."""
    template = read_recipe(ROOT / "recipes" / f"{name}.yaml").get("chat_template_path")
    if template is not None:
        path = chat_template(template)
        assert path.endswith(f"{template}.jinja")
        assert "{% generation %}" in Path(path).read_text().replace("{%-", "{%").replace("-%}", "%}")


def test_trl_mixture_of_datasets(tmp_path):
    path = write(tmp_path, 'use_cpu: true\nbf16: false\ndatasets: [{"path": "json", "data_files": "a.json"}]\n')
    assert load_recipe(path).mixture.datasets[0].path == "json"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "learning_rat: 1e-5",
            [],
            "mine.yaml: unknown key `learning_rat` for `trainer: sft`; did you mean `learning_rate`?",
        ),
        ("max_steps: 0", [], "mine.yaml: `max_steps` is 0; it must be 1 or more, or -1 for"),
        (
            "use_cpu: true",
            ["--per_device_train_batch_size", "0"],
            "`per_device_train_batch_size` is 0; it must be",
        ),
        ("learning_rate: -1e-4", [], "`learning_rate` is -0.0001; it must be 0 or more"),
        ("trainer: grpo\ntemperature: 0", [], "`temperature` is 0; it must be above 0"),
        ("trainer: grpo\nnum_generations: 1", [], "`num_generations` is 1; it must be 2 or more"),
        ("trainer: grpo\nscale_rewards: std", [], "`scale_rewards` is 'std'; it must be one of 'group', 'batch'"),
        ("trainer: dpo\nf_divergence_type: kl", [], "`f_divergence_type` is 'kl'; it must be one of 'reverse_kl'"),
        ("use_cpu: true\nbf16: false\nactivation_offloading: true", [], "there is no accelerator to offload from"),
        ("use_peft: true\nlora_r: 0", [], "`lora_r` is 0; it must be 1 or more"),
        ("max_steps: many", [], "mine.yaml: `max_steps` is 'many'; it must be int"),
        ("max_steps: [1]", [], "`max_steps` is [1]; it must be int"),
        ("max_steps: true", [], "`max_steps` is True; it must be int"),
        ("bf16: maybe", [], "`bf16` is 'maybe'; it must be bool"),
        ("trainer: sfr", [], "`trainer` is 'sfr'; it must be one of 'sft', 'causal_lm'"),
        ("dtype: int7", [], "`dtype` is 'int7'; it must be one of 'auto', 'bfloat16'"),
        ("lr_scheduler_type: cosin", [], "`lr_scheduler_type` is 'cosin'; it must be one of 'linear', 'cosine'"),
        ("lr_scheduler_type: null", [], "`lr_scheduler_type` is None; it must be one of 'linear', 'cosine'"),
        ("lora_target_modules: {a: 1}", [], "`lora_target_modules` is {'a': 1}; it must be list"),
        ("use_cpu: true", ["--max_step", "3"], "On the command line: unknown key `max_step`"),
        ("use_cpu: true", ["--max_steps", "three"], "On the command line: argument --max_steps"),
        ("use_cpu: true", ["--bf16", "maybe"], "argument --bf16: Truthy value expected: got maybe"),
        ("use_cpu: true", ["three"], "'three' follows no option"),
        ("use_cpu: true\nbf16: false\nliger_kernel_config: {rms_nrom: true}", [], "did you mean 'rms_norm'?"),
        ("model_config: {hidden_size: 8}", [], "`model_config` has no `model_type`"),
        ("use_cpu: true\nbf16: false\nload_in_8bit: true\nload_in_4bit: true", [], "8 bit and 4 bit"),
        ("use_cpu: true\nload_in_4bit: true", [], "`load_in_4bit` is true, but `use_peft` is false"),
        ("use_cpu: true\nload_in_8bit: true", [], "Set `use_peft: true` for adapters on them (QLoRA)"),
        ("use_cpu: true\nfp8_base: true", [], "`fp8_base` is true, but `use_peft` is false: such a base is frozen"),
        ("use_cpu: true", ["--packed_base", "true"], "`packed_base` is true, but `use_peft` is false"),
        ("expert_parallel_size: 0", [], "`expert_parallel_size` is 0; it must be 1 or more"),
        ("use_cpu: true\nrouter_aux_loss_coef: -0.1", [], "`router_aux_loss_coef` is -0.1; it must be 0 or more"),
        (
            "use_cpu: true\nload_in_4bit: true\nuse_peft: true\nexpert_parallel_size: 2",
            [],
            "`expert_parallel_size` is 2 and `load_in_4bit` is true",
        ),
        (
            "use_cpu: true\nexpert_parallel_size: 2\nuse_peft: true\nlora_target_parameters: [experts.down_proj]",
            [],
            "`expert_parallel_size` is 2 and `lora_target_parameters` is ['experts.down_proj']: PEFT has no adapters",
        ),
        (
            "trainer: grpo\nuse_cpu: true\nexpert_parallel_size: 2\nuse_vllm: true",
            [],
            "`expert_parallel_size` is 2 and `use_vllm` is true: TRL would give vLLM the weights of one process",
        ),
        (  # TRL's own default is 0.05, and PEFT's error names no key
            "use_cpu: true\nuse_peft: true\nlora_target_parameters: [experts.gate_up_proj, experts.down_proj]",
            [],
            "`lora_dropout` is 0.05, but PEFT has no dropout in adapters of parameters, which `lora_target_parameters` "
            "names. Set `lora_dropout: 0.0`.",
        ),
        ("- a\n- b", [], "a recipe is a YAML mapping"),
        ("a: [1", [], "mine.yaml is not valid YAML: line 1, column 6: while parsing a flow sequence"),
        ("trainer: sft\n\tmax_steps: 5", [], "mine.yaml is not valid YAML: line 2, column 1: "),
        ("trainer: sft\n\tmax_steps: 5", [], "Indent with spaces."),
        ("max_steps: 5\nseed: 1\nmax_steps: 6", [], "line 3, column 1: the key `max_steps` appears twice."),
        ("model_config: {a: 1, a: 2}", [], "line 1, column 22: the key `a` appears twice."),
    ],
)
def test_mistakes_have_one_message(tmp_path, text, options, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, text), options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not str(error.value).endswith("..")


@pytest.mark.parametrize("key", ["cuda_graphs", "packed_base"])
def test_values_of_a_switch_are_listed_once(tmp_path, key):
    for text, options in ((f"{key}: maybe", []), ("use_cpu: true", [f"--{key}", "maybe"])):
        with pytest.raises(RecipeError) as error:
            load_recipe(write(tmp_path, text), options)
        assert str(error.value).replace("'", "").rstrip(").").endswith(" auto, true, false")


@pytest.mark.parametrize("given", ["true", "True", "TRUE", True])
def test_a_switch_in_its_spellings(tmp_path, given):
    in_yaml = check_values({"cuda_graphs": given}, [], tmp_path) if given in ("true", True) else None
    for values, _ in filter(None, (in_yaml, check_values({}, ["--cuda_graphs", str(given)], tmp_path))):
        assert cuda_graphs_of(SimpleNamespace(**values)) is True


def test_lora_that_is_not_switched_on_is_a_warning(tmp_path, caplog):
    path = write(tmp_path, "use_cpu: true\nbf16: false\nlora_target_modules: [q_proj]\n")
    load_recipe(path)
    assert "`use_peft` is false: the whole model is trained" in caplog.text
    caplog.clear()
    load_recipe(path, ["--use_peft", "true"])
    assert not caplog.text


@pytest.mark.parametrize("use_cpu", [True, False])
def test_defaults_fit_a_machine_without_a_gpu(tmp_path, monkeypatch, use_cpu):
    """TRL's own default is bf16, which the Trainer refuses there."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    recipe = load_recipe(write(tmp_path, f"trainer: sft\nuse_cpu: {json.dumps(use_cpu)}\n"))
    assert recipe.training.bf16 is False
    assert recipe.training.dataloader_pin_memory is False


def test_bf16_without_a_gpu_is_refused_unless_the_cpu_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    path = write(tmp_path, "trainer: sft\nbf16: true\n")
    words = r"`bf16` is true, but there is no GPU here .* `--bf16 false --dtype float32`"
    with pytest.raises(RecipeError, match=words):
        load_recipe(path)
    assert load_recipe(path, ["--use_cpu", "true"]).training.bf16 is True
    with pytest.raises(RecipeError, match=r"`dtype` is 'bfloat16', but there is no GPU here .* add `--dtype float32`"):
        load_recipe(path, ["--bf16", "false", "--dtype", "bfloat16"])


@pytest.mark.parametrize("bf16", [True, False])
def test_the_recipe_says_whether_autocast_is_on_not_the_launcher(tmp_path, monkeypatch, bf16):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if not bf16 else "no")
    assert minimal(tmp_path, bf16=bf16).training.mixed_precision == ("bf16" if bf16 else "no")


OFF = {"liger_kernel_config": {"attention": False}}


@pytest.mark.parametrize(
    ("written", "keys", "taken"),
    [
        ("auto", {}, None),
        ("auto", {"liger_kernel_config": {"rope": False}}, None),
        ("auto", OFF, "flash_attention_2"),
        ("auto", {"use_liger_kernel": False}, "flash_attention_2"),
        ("auto", {**OFF, "dtype": "float32"}, None),
        ("flash_attention_2", {}, "flash_attention_2"),
        ("sdpa", {}, "sdpa"),
        ("eager", OFF, "eager"),
        (None, OFF, None),
    ],
)
def test_attention_that_a_recipe_loads_its_model_with(tmp_path, monkeypatch, written, keys, taken):
    """None is transformers' default, SDPA or eager attention, in whose place ours runs."""
    recipe = minimal(tmp_path, **{"dtype": "bfloat16", "attn_implementation": written, **keys})
    recipe.training.use_cpu = False  # on a machine with a GPU and flash-attn
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "flash_attn" or find(name, *more))
    assert attention(recipe) == taken
    recipe.training.use_cpu = True
    assert attention(recipe) == (None if written == "auto" else taken)


def test_auto_takes_no_flash_attention_that_is_not_installed(tmp_path, monkeypatch):
    recipe = minimal(tmp_path, dtype="bfloat16", attn_implementation="auto", **OFF)
    recipe.training.use_cpu = False
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "flash_attn" else find(name, *more)
    )
    assert attention(recipe) is None


def test_mxfp4_checkpoints_are_loaded_in_16_bits(tmp_path, caplog):
    """On a GPU, transformers keeps them packed, and refuses to train them."""
    assert "quantization_config" not in model_kwargs(minimal(tmp_path))
    write_mxfp4(tmp_path / "model")
    recipe = minimal(tmp_path, model_config=None, model_name_or_path=str(tmp_path / "model"))
    assert model_kwargs(recipe)["quantization_config"].dequantize is True
    assert "MXFP4 in the checkpoint, are loaded in 16 bits" in caplog.text
    assert load_model(recipe, str(tmp_path / "model")).model.layers[0].mlp.experts.gate_up_proj.is_floating_point()


def test_packed_checkpoints_stay_packed_under_adapters(tmp_path, monkeypatch):
    write_mxfp4(tmp_path / "model")

    def asked(**values):
        named = {"model_config": None, "model_name_or_path": str(tmp_path / "model"), "use_peft": True}
        return model_kwargs(minimal(tmp_path, **named, **values))

    assert "quantization_config" not in asked()
    assert "quantization_config" not in asked(packed_base=True)
    assert asked(packed_base=False)["quantization_config"].dequantize is True
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert asked()["quantization_config"].dequantize is True


def test_experts_are_split_over_the_processes_of_the_launch(tmp_path, monkeypatch):
    assert "distributed_config" not in model_kwargs(minimal(tmp_path))
    recipe = minimal(tmp_path, expert_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert model_kwargs(recipe)["distributed_config"] == {"fsdp_size": 4, "ep_size": 2}
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RecipeError, match=r"`expert_parallel_size` is 2, but the number of processes is 3; launch a"):
        model_kwargs(recipe)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 3}, "the model has 3 experts a layer; it must be a divisor of 3"),
        ({"model_type": "mixtral", "num_local_experts": 5}, "the model has 5 experts a layer"),
        ({"model_type": "llama"}, r"\(llama\) names no experts; leave it out"),
        ({"model_type": "doge", "is_moe": True, "num_experts": 4}, r"cannot split the experts of this model \(doge\)"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "the number of processes is 1; launch a multiple of 2"),
    ],
)
def test_experts_that_cannot_be_split_are_refused_before_anything_is_written(tmp_path, model, message):
    output = tmp_path / "out"
    recipe = minimal(tmp_path, model_config=model, expert_parallel_size=2, bf16=False, output_dir=str(output))
    with pytest.raises(RecipeError, match=message):
        run_recipe(recipe)
    assert not output.exists()


@pytest.mark.parametrize(("flag", "way"), [("FSDP", "FSDP"), ("DEEPSPEED", "DeepSpeed")])
def test_experts_are_not_split_by_the_launch_too(tmp_path, monkeypatch, flag, way):
    model = {"model_type": "qwen3_moe", "num_experts": 4}
    recipe = minimal(tmp_path, model_config=model, bf16=False, expert_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_model(recipe)
    monkeypatch.setenv(f"ACCELERATE_USE_{flag}", "true")
    words = rf"the launch splits it with {way}; launch it with `--accelerate_config ddp`"
    with pytest.raises(RecipeError, match=words):
        check_model(recipe)


def test_merge_keys_of_yaml_are_no_duplicates(tmp_path):
    path = write(tmp_path, "model_config: &base {model_type: llama}\ntrainer: causal_lm\n")
    path.write_text(path.read_text() + "liger_kernel_config:\n  <<: *base\n  rope: false\n")
    assert read_recipe(path)["liger_kernel_config"] == {"model_type": "llama", "rope": False}


def test_a_recipe_that_is_not_there():
    with pytest.raises(RecipeError, match="Did you mean 'quickstart'"):
        find_recipe("quikstart")
    with pytest.raises(RecipeError, match="`liger-trainer recipes` lists the "):
        find_recipe("nowhere/none.yaml")


def test_importing_the_command_is_quick():
    heavy = (
        "import sys, liger_trainer.tools.cli.parser\n"
        "print(sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
