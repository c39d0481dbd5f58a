"""README, CONTRIBUTING and docs/ are true: their Python runs, and what they name exists."""

import copy
import dataclasses
import importlib.util
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser as torchrun_parser

import liger_trainer
from liger_trainer.benchmarks import registry
from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_configs
from liger_trainer.recipe.load import check_values
from liger_trainer.recipe.rewards import load_reward_functions
from liger_trainer.recipe.schema import RewardArguments
from liger_trainer.tools.cli.parser import make_parser
from liger_trainer.tools.comparing.request import Request, values_of
from tests.documents import PAGES, ROOT, anchors, blocks, commands, name, prose, python_blocks
from tests.forked import torchrun
from tests.hub import save_hub

FOLDERS = ("kernels", "liger_trainer", "configs", "callbacks", "recipes", "benchmarks", "examples", "tests", "docs")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return save_hub(tmp_path_factory.mktemp("hub"))


def two_steps(source):
    return re.sub(r'(output_dir="[^"]*")', r"\1, max_steps=2, max_grad_norm=1.0", source)


@pytest.mark.parametrize(("page", "source"), python_blocks(two_processes=False))
def test_python(page, source, hub, monkeypatch):
    """Each block as it is written, but for two steps instead of epochs."""
    imported = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    missing = [library for library in imported if importlib.util.find_spec(library) is None]
    if missing:
        pytest.skip(f"the block imports {', '.join(missing)}, which no test needs")
    monkeypatch.chdir(hub)
    registry.load_operations()
    monkeypatch.setattr(registry, "OPERATIONS", copy.deepcopy(registry.OPERATIONS))  # a block adds providers
    exec(compile(two_steps(source), page, "exec"), {"__name__": "page"})


@pytest.mark.parametrize(("page", "source"), python_blocks(two_processes=True))
def test_python_on_two_processes(page, source, hub):
    done = torchrun(run, two_steps(source), str(hub), environment={"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, f"{page}\n{done.stderr[-4000:]}"


def run(source, folder):
    import accelerate

    # Only this check keeps accelerate from splitting a model over CPUs.
    accelerate.ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    os.chdir(folder)
    exec(compile(source, "page", "exec"), {"__name__": "page"})


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The folder that commands are given in: the repository, and a recipe of one's own."""
    for folder in ("recipes", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (recipe,) = blocks(ROOT / "docs" / "guides" / "recipes.md", "yaml")
    (tmp_path / "my.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(line):
    """Words of a line, of the command that a container runs; shell variables become 1."""
    words = shlex.split(re.sub(r"\$(\(.*?\)|\w+)", "1", line))
    words = words[words.index("liger-trainer") :] if words[:2] == ["docker", "run"] else words
    while "=" in words[0]:
        del words[0]
    return words


@pytest.mark.parametrize("line", commands())
def test_command(line, checkout):
    program, *words = words_of(line)
    if program == "make":
        targets = [word for word in words if "=" not in word]
        for target in targets:
            assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "pip":
        assert words[0] == "install"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt"))
        assert all(extra in extras for found in re.findall(r"\[(.*)\]", line) for extra in found.split(","))
    elif program == "accelerate":
        assert words[0] == "launch"
        arguments = launch_command_parser().parse_args(words[1:])
        assert arguments.config_file is None or os.path.isfile(arguments.config_file)
        train(arguments.training_script, arguments.training_script_args, arguments.module)
    elif program == "torchrun":
        arguments = torchrun_parser().parse_args(words)
        script = arguments.training_script_args
        if arguments.training_script == "liger_trainer":
            assert script[0] == "train"
            script = script[1:]
        train(arguments.training_script, script, arguments.module)
    elif program in ("python", "pytest", "ruff", "mypy"):
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    elif program == "liger-trainer":
        arguments, rest = make_parser().parse_known_args(words)
        if arguments.command in ("train", "plan"):
            recipe(arguments.recipe, rest)
        elif arguments.command == "data":
            check_values({"data_files": arguments.files, "output_dir": "run"}, rest, Path("the page"))
            assert getattr(arguments, "accelerate_config", None) in (None, *shipped_configs())
        elif arguments.command == "compare":
            values_of(Request(arguments.recipe, tuple(rest), 1, arguments.smoke, Path()))
        elif arguments.command == "doctor" and rest:
            recipe(arguments.subject, rest)
        else:
            assert rest == []
    else:
        raise AssertionError(f"nothing checks `{program}`")


def train(script, options, module):
    """What a launcher starts: a recipe, a script, or a module of this package."""
    if module and script != "liger_trainer":
        assert script.startswith("liger_trainer.")
        assert (ROOT / (script.removeprefix("liger_trainer.").replace(".", "/") + ".py")).is_file()
        return
    if script.endswith(".py"):
        assert (ROOT / script).is_file()
        return
    path, *rest = [*options] if module else [script, *options]
    recipe(path, [word for word in rest if word != "--smoke"])


def recipe(path, options):
    found = find_recipe(path)
    check_values(read_recipe(found), options, found)


@pytest.mark.parametrize(("page", "text"), [(name(page), text) for page in PAGES for text in blocks(page, "yaml")])
def test_yaml(page, text, tmp_path):
    values, *_ = check_values(yaml.safe_load(text), [], tmp_path / "page.yaml")
    assert values
    if values["trainer"] in ("grpo", "rloo"):
        names = ("reward_funcs", "reward_options")
        arguments = RewardArguments(*(values.get(name) for name in names))
        arguments.reward_funcs = [name for name in arguments.reward_funcs if name.startswith("liger_trainer.")]
        assert all(callable(function) for function in load_reward_functions(arguments))


def paths(page):
    """What stands between backticks and looks like a path in the repository."""
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        for word in code.split():
            word = word.split("::")[0].rstrip(",;:)")
            if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", word) or re.fullmatch(r"[\w.-]+\.(md|toml|yml)", word):
                yield word


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page):
    missing = [word for word in paths(page) if not list(ROOT.glob(word.rstrip("/")))]
    placeholder = r"FAMILY|OPERATOR|STRUCTURE|NAME|/__init__\.py$"  # the last is named where it must not be
    assert not [word for word in missing if not re.search(placeholder, word)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        path, _, section = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not section or section in anchors(file), target


def differences():
    """The rows of the tables of docs/differences.md, without the two lines above each table."""
    lines = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and not re.match(r"\| stock \||\|-", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


@pytest.mark.parametrize(("stock", "ours", "issue", "tests"), differences())
def test_a_difference_names_a_test_that_exists(stock, ours, issue, tests):
    assert stock
    assert ours
    assert issue == "– (no issue found)" or re.search(r"\[[\w-]+#\d+\]\(https://github\.com/[\w/-]+/\d+\)", issue)
    named = re.findall(r"`([^`]+)::(\w+)`", tests)
    assert len(named) == tests.count("`") / 2 > 0
    for path, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


def test_options_are_all_there_with_their_defaults():
    from liger_trainer.configs.kernel_config import KERNEL_KEYS, KernelConfig
    from liger_trainer.configs.trl_configs import SharingFlags

    text = (ROOT / "docs" / "api" / "options.md").read_text(encoding="utf-8")
    table, switches = text.split("## Switches")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, flags=re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(SharingFlags)}
    assert set(rows) == set(fields)
    for option, shown in rows.items():
        if option != "liger_kernel_config":
            default = str(fields[option])
            assert shown.strip("` ") in (default, default.lower())
    named = set(re.findall(r"^\| `(\w+)` \|", switches, flags=re.MULTILINE))
    assert named == {field.name for field in dataclasses.fields(KernelConfig)} - {"logits_memory"}
    assert set(KERNEL_KEYS) <= named


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "api")
    for public in liger_trainer.__all__:
        shown = public.removeprefix("apply_liger_kernel_to_")
        if public != "__version__":
            assert re.search(rf"\b{shown}\b", text), public


def test_install_names_the_declared_versions():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\w+) \| (\d[^|]*) \| ([^|]*)\|$", text, flags=re.MULTILINE)
    rows, ran = ({row[0]: row[column].strip() for row in found} for column in (1, 2))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    declared = {Requirement(line).name: Requirement(line).specifier for line in lines}
    for package in ("torch", "Triton", "transformers", "TRL", "PEFT", "accelerate", "datasets"):
        for specifier in declared[package.lower()]:
            word = {">=": f"{specifier.version} or newer", "<": f"below {specifier.version}"}[specifier.operator]
            assert word in rows[package], package
    pinned = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert {name.lower(): version for name, version in ran.items() if version} == {
        name: pinned[name] for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_this_package_comes_from_a_checkout_or_its_wheel(page):
    """No index has it by its name; once it is installed, pip takes its extras alone."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"pip install [^\n`]*\bliger[-_]trainer(?![-_\[\w])", text)
    assert set(re.findall(r"liger_trainer-([\w.]+)-py3-none-any\.whl", text)) <= {liger_trainer.__version__}


def test_printed_report_is_what_the_code_before_it_prints(monkeypatch, capsys):
    guide = ROOT / "docs" / "guides" / "patching.md"
    monkeypatch.setenv("COLUMNS", "120")
    (source,) = (code for code in blocks(guide, "python") if "print(apply_liger_kernel(" in code)
    (shown,) = blocks(guide, "text")
    exec(compile(source, str(guide), "exec"), {"__name__": "guide"})

    def lines(text):  # probe errors and the time are of this processor
        text = re.sub(r"\d\.\de[+-]\d\d", "0.0e+00", re.sub(r"in \d+\.\d s\.", "in 0.1 s.", text))
        return [line.rstrip() for line in text.rstrip().splitlines()]

    assert lines(shown) == lines(capsys.readouterr().out)
