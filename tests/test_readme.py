"""The README is true: its Python runs, its commands exist, its recipe parses, its options and links are real."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import liger_trainer
from liger_trainer.cli.parser import make_parser
from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_configs, shipped_recipes
from liger_trainer.recipe.load import check_values
from liger_trainer.recipe.quickstart import train_tokenizer
from liger_trainer.recipe.rewards import load_reward_functions
from liger_trainer.recipe.schema import TRAINERS, RewardArguments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands():
    lines = (line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines())
    return sorted({line for line in lines if line})


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with tiny stand-ins under the names of the Hub; a relative folder comes before the Hub."""
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("hub")
    text = [f"The answer to question {number} is {number * 3}." for number in range(50)]
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": line}] for line in text]
    tokenizer = train_tokenizer(text, 300)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**size, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    llamas = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct")
    for name in (*llamas, "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"):  # of one architecture, which the blocks do not look at
        LlamaForCausalLM(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, rows in (
        ("my/texts", [{"text": line} for line in text]),
        ("trl-lib/Capybara", [{"messages": row} for row in turns]),
        ("trl-lib/ultrafeedback_binarized", [{"chosen": row, "rejected": bad} for row, bad in zip(turns, turns[::-1])]),
        (
            "trl-lib/kto-mix-14k",
            [{"prompt": row[:1], "completion": row[1:], "label": row in turns[::2]} for row in turns],
        ),
        ("trl-lib/DeepMath-103K", [{"prompt": row[:1], "solution": "$3$"} for row in turns]),
    ):
        (root / name).mkdir(parents=True)
        (root / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python(number, hub, monkeypatch):
    """Each block as it stands, but for two steps instead of epochs."""
    monkeypatch.chdir(hub)
    source = re.sub(r'(output_dir="[^"]*")', r"\1, max_steps=2, max_grad_norm=1.0", blocks("python")[number])
    exec(compile(source, f"README block {number}", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", commands())
def test_command(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^(\w+ )*{words[1]}( \w+)*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        assert words[-1] == "."
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt"))
    elif words[:2] == ["accelerate", "launch"]:
        target = words[2]
        assert (words[2:4] == ["-m", "liger_trainer"]) or (ROOT / target).is_file()
        assert set(words[3:]) <= {"--smoke", "liger_trainer", "my.yaml"}
    else:
        assert words[0] == "liger-trainer"
        arguments, rest = make_parser().parse_known_args(words[1:])
        if arguments.command == "train":
            path = find_recipe(arguments.recipe)
            check_values(read_recipe(path), rest, path)
            assert arguments.accelerate_config in (None, *shipped_configs())
        else:
            assert rest == []


def test_yaml(tmp_path):
    first, second = (check_values(yaml.safe_load(block), [], tmp_path / "readme.yaml")[0] for block in blocks("yaml"))
    assert first["learning_rate"] == 2e-4
    assert first["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    arguments = RewardArguments(*(second[name] for name in ("reward_funcs", "reward_options", "system_prompt")))
    assert arguments.system_prompt == "Put the final answer in \\boxed{}."
    arguments.reward_funcs = [name for name in arguments.reward_funcs if name.startswith("liger_trainer.")]
    assert all(callable(function) for function in load_reward_functions(arguments))


def test_recipes_are_those_of_the_table():
    lines = re.findall(r"^\| `(\w+_)` \|(.*)\|$", README, flags=re.MULTILINE)
    methods = ("sft", "dpo", "kto", "orpo", "simpo", "grpo")
    named = set(re.findall(r"`(quickstart\w*)`", README))
    for prefix, cells in lines:
        *ticks, more = cells.split("|")
        named |= {prefix + method for method, tick in zip(methods, ticks, strict=True) if "✓" in tick}
        named |= {prefix + method for method in re.findall(r"`(\w+)`", more)}
    assert named == set(shipped_recipes())


def test_options_are_all_there_with_their_defaults():
    from liger_trainer.configs.flags import KernelFlags
    from liger_trainer.configs.kernel_config import KERNEL_KEYS

    table = README.split("## Options", 1)[1].split("##", 1)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, flags=re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(KernelFlags)}
    assert set(rows) == set(fields)
    for name, shown in rows.items():
        if name != "liger_kernel_config":
            default = str(fields[name])
            assert shown.strip("` ") in (default, default.lower())
    assert all(f"`{key}`" in table for key in KERNEL_KEYS)


def test_every_public_name_is_documented():
    siblings = ("apply_liger_kernel_to_", "__version__")
    configs = {f"Liger{kind.name}Config" for kind in TRAINERS.values()}  # "each with its config"
    names = {name for name in liger_trainer.__all__ if not name.startswith(siblings)} - configs
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}\b", README)]


def test_links_lead_somewhere():
    # docs/images/gain.png is drawn from a benchmark run
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("http")]
    assert targets
    for target in targets:
        path, _, section = target.partition("#")
        assert (ROOT / path).exists() or path == "docs/images/gain.png", target
        if section:
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
            assert section in [heading.lower().replace(" ", "-") for heading in headings], target


def test_changelog_names_the_version():
    from liger_trainer._version import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
