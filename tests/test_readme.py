"""The README is true: its Python runs, its commands exist, its recipe parses, its options and links are real."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from liger_trainer.cli.parser import make_parser
from liger_trainer.cli.train import shipped_configs
from liger_trainer.quickstart import train_tokenizer
from liger_trainer.recipe import check_values
from liger_trainer.recipe_file import find_recipe

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
    tokenizer = train_tokenizer(text, 300)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**size, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    folder = root / "meta-llama" / "Llama-3.1-8B"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, rows in (
        ("my/texts", [{"text": line} for line in text]),
        (
            "trl-lib/Capybara",
            [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": line}]} for line in text],
        ),
    ):
        (root / name).mkdir(parents=True)
        (root / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python(number, hub, monkeypatch, device):
    """Each block as it stands, but for two steps instead of epochs, and the CPU where there is nothing else."""
    monkeypatch.chdir(hub)
    changes = ", max_steps=2, max_grad_norm=1.0" + (", use_cpu=True, bf16=False" if device == "cpu" else "")
    source = re.sub(r'(output_dir="[^"]*")', rf"\1{changes}", blocks("python")[number])
    exec(compile(source, f"README block {number}", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", commands())
def test_command(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
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
            check_values({"trainer": "sft"}, rest, path)
            assert arguments.accelerate_config in (None, *shipped_configs())
        else:
            assert rest == []


def test_yaml(tmp_path):
    (block,) = blocks("yaml")
    values, _ = check_values(yaml.safe_load(block), [], tmp_path / "readme.yaml")
    assert values["learning_rate"] == 2e-4
    assert values["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]


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


def test_links_lead_somewhere():
    # docs/images/gain.png is drawn from a benchmark run
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("http")]
    assert targets
    for target in targets:
        assert (ROOT / target).exists() or target == "docs/images/gain.png", target


def test_changelog_names_the_version():
    from liger_trainer._version import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
