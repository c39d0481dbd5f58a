"""The examples and notebooks run offline, take the name of a real model, and the scripts launch what they say."""

import ast
import json
import re
import runpy
import socket
import stat
import subprocess
import sys

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import Trainer

import liger_trainer
from tests.documents import ROOT, name
from tests.hub import save_hub

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    return tmp_path


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return save_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def untrained(monkeypatch):
    """Trainers are built from models, arguments and data, and do not train."""
    monkeypatch.setattr(Trainer, "train", lambda self, *arguments, **options: None)


def run(path, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    return runpy.run_path(str(path), run_name="__main__")["trainer"]


def of_the_package(tree):
    """What a file imports from `liger_trainer` itself."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "liger_trainer"]
    return {alias.name for node in imports for alias in node.names}


def test_every_trainer_has_an_example_and_a_row():
    shown = [of_the_package(ast.parse(path.read_text(encoding="utf-8"))) for path in EXAMPLES]
    trainers = [item for names in shown for item in names if item.endswith("Trainer")]
    assert sorted(trainers) == sorted(item for item in liger_trainer.__all__ if item.endswith("Trainer"))
    rows = dict(re.findall(r"^\| `(\w+\.py)` \| `(\w+)`", PAGE, flags=re.MULTILINE))
    assert rows.keys() == {path.name for path in EXAMPLES}
    assert all(rows[path.name] in names for path, names in zip(EXAMPLES, shown, strict=True))
    assert all(f"`{path.relative_to(ROOT / 'examples')}`" in PAGE for path in (*NOTEBOOKS, *SCRIPTS))
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert re.findall(r'^--8<-- "(.*\.py)"$', page, flags=re.MULTILINE) == [name(path) for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, here, monkeypatch):
    trainer = run(path, [], monkeypatch)
    assert trainer.state.global_step == 3
    assert trainer.kernel_report.applied
    assert (here / "outputs" / path.stem / "checkpoint-3").is_dir()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_with_a_real_name(path, hub, untrained, monkeypatch):
    monkeypatch.chdir(hub)
    teacher = ["--teacher", "Qwen/Qwen3-32B"] if '"--teacher"' in path.read_text() else []
    trainer = run(path, ["--model", "Qwen/Qwen3-8B", *teacher], monkeypatch)
    assert trainer.model.config.vocab_size == 300
    assert trainer.args.max_steps == -1
    if teacher:
        with pytest.raises(SystemExit):
            run(path, ["--model", "Qwen/Qwen3-8B"], monkeypatch)


def cells(path):
    """The cells of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def execute(path, change=lambda source: source, until=None):
    """Executes the code of a notebook in order, up to the cell that gives the variable `until`."""
    variables = {"__name__": "__main__"}
    for cell in cells(path):
        if cell["cell_type"] == "code" and until not in variables:
            exec(compile(change("".join(cell["source"])), f"{path.name}, {cell['id']}", "exec"), variables)
    return variables


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, here):
    variables = execute(path)
    key, gain = {"sft": ("loss", -2), "dpo": ("rewards/accuracies", 0.25), "grpo": ("reward", 0.1)}[path.stem]
    first, *_, last = [log[key] for log in variables["trainer"].state.log_history if key in log]
    assert (last - first) / gain > 1, (first, last)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_with_a_real_name(path, hub, untrained, monkeypatch):
    monkeypatch.chdir(hub)
    variables = execute(path, lambda source: source.replace("MODEL = None", 'MODEL = "Qwen/Qwen3-8B"'), "trainer")
    assert variables["trainer"].model.config.vocab_size == 300


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_one_of_format_4_5_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"].keys() == {"display_name", "language", "name"}
    for cell in notebook["cells"]:
        code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        assert cell == {
            "cell_type": cell["cell_type"],
            "id": cell["id"],
            "metadata": {},
            "source": cell["source"],
            **code,
        }
        assert cell["cell_type"] in ("code", "markdown")
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
        assert all(isinstance(line, str) for line in cell["source"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


PROGRAMS = {
    "accelerate": 'printf "%s\\n" "$@"',
    "srun": '[[ $SRUN_CPUS_PER_TASK == 64 ]] && SLURM_NODEID=1 exec "$@"',
    "getent": '[[ $2 == node3 ]] && printf "10.0.0.3  STREAM node3\\n10.0.0.3  DGRAM\\n"',
    "hostname": 'printf "172.17.0.1 %s \\n" "${ADDRESS:-10.0.0.4}"',
    "scontrol": '[[ $* == "show hostnames node[3-4]" ]] && printf "node3\\nnode4\\n"',
}
ENVIRONMENT = {
    "slurm": {
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    },
    "two_machines": {"MAIN_HOST": "node3", "MACHINE_RANK": "1", "GPUS": "8"},
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with programs of a cluster, as far as the scripts use them."""
    folder = tmp_path_factory.mktemp("programs")
    for program, line in PROGRAMS.items():
        (folder / program).write_text(f"#!/bin/bash\n{line}\n")
        (folder / program).chmod(0o755)
    return folder


def start(path, programs, arguments, environment, cwd=ROOT):
    environment = {"PATH": f"{programs}:/usr/bin:/bin", **environment}
    return subprocess.run(["bash", path, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_launches(path, programs):
    done = start(path, programs, ["my recipe.yaml", "--learning_rate", "1e-5"], ENVIRONMENT[path.stem])
    assert done.returncode == 0, done.stderr
    program, *words = done.stdout.splitlines()
    assert program == "launch"
    launch = launch_command_parser().parse_args(words)
    assert (launch.num_machines, launch.num_processes, launch.machine_rank) == (2, 16, 1)
    assert (launch.main_process_ip, launch.main_process_port) == ("node3", 29500)
    assert yaml.safe_load((ROOT / launch.config_file).read_text())["fsdp_config"]["fsdp_version"] == 2
    assert (launch.module, launch.training_script) == (True, "liger_trainer")
    recipe = ["train", "my recipe.yaml", "--learning_rate", "1e-5"]
    assert launch.training_script_args[:4] == recipe
    assert launch.training_script_args[4:] == (["--resume_from_checkpoint", "true"] if path.stem == "slurm" else [])
    assert path.stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize(
    ("script", "changed", "message"),
    [
        *(("slurm", {key: ""}, f"{key}: is not set") for key in ("SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE")),
        *(("two_machines", {key: ""}, f"{key}: is not set") for key in ENVIRONMENT["two_machines"]),
        ("two_machines", {"GPUS": "eight"}, "GPUS is eight; it must be a whole number"),
        ("two_machines", {"GPUS": "0"}, "GPUS is 0; give the number of GPUs that each machine has"),
        ("two_machines", {"PORT": "abc"}, "PORT is abc; it must be a whole number"),
        ("two_machines", {"PORT": "99999"}, "PORT is 99999; it must be from 1 to 65535"),
        ("two_machines", {"MACHINE_RANK": "2"}, "MACHINE_RANK is 2; it must be below MACHINES, 2"),
        ("two_machines", {"MAIN_HOST": "node9"}, "MAIN_HOST is node9, which has no address here"),
        ("slurm", {"CONFIG": "my.yaml"}, "CONFIG is my.yaml, which is no file"),
        ("two_machines", {"CONFIG": "my.yaml"}, "CONFIG is my.yaml, which is no file"),
    ],
)
def test_script_says_what_is_missing(script, changed, message, programs):
    path = ROOT / "examples" / f"{script}.sh"
    done = start(path, programs, ["my.yaml"], ENVIRONMENT[script] | changed)
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert message in line


def test_the_first_machine_is_told_that_its_port_is_taken(programs):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        changed = {"MACHINE_RANK": "0", "PORT": port, "ADDRESS": "10.0.0.3"}
        done = start("examples/two_machines.sh", programs, ["my.yaml"], ENVIRONMENT["two_machines"] | changed)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"PORT is {port}, which another program of this machine has")
        changed |= {"MACHINE_RANK": "1", "ADDRESS": "10.0.0.4"}  # where the port is nothing to it
        done = start("examples/two_machines.sh", programs, ["my.yaml"], ENVIRONMENT["two_machines"] | changed)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rank", "address", "warns"), [(0, 3, False), (1, 4, False), (0, 4, True), (1, 3, True)])
def test_a_rank_that_is_not_its_machine_s_is_asked_about(rank, address, warns, programs):
    changed = {"MACHINE_RANK": str(rank), "ADDRESS": f"10.0.0.{address}"}
    done = start("examples/two_machines.sh", programs, ["my.yaml"], ENVIRONMENT["two_machines"] | changed)
    assert done.stdout.startswith("launch\n"), done.stderr
    *asked, waits = done.stderr.splitlines()
    assert waits == f"machine {rank} of 2 waits for the others at node3:29500, for ten minutes"
    assert (
        asked
        == [f"MAIN_HOST is node3 and MACHINE_RANK {rank}: is this the first machine? 0 is the one at MAIN_HOST"] * warns
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_without_a_recipe(path, programs):
    done = start(path, programs, [], ENVIRONMENT[path.stem])
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "the recipe" in line
