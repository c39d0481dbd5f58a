"""Runs the parity tests with the oldest and the newest versions of the libraries that pyproject.toml allows.

A third set is the oldest transformers that models are patched with (docs/install.md), and the tests of patching; all
else comes from the environment that runs this script, since the extra `test` asks for a newer one. Each set gets a
virtual environment of its own, such as `.venv-oldest`. Arguments that are not known here go to pytest.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")
TESTS = (
    "tests/compat",
    "tests/graphs",
    "tests/trainers/test_parity.py",
    "tests/trainers/test_parity_orpo_cpo.py",
    "tests/trainers/test_parity_distillation.py",
    "tests/trainers/test_stock_trainer.py",
    "tests/trainers/test_checkpoints.py",
    "tests/patching/test_apply.py",
    "tests/patching/test_rope.py",
)
EXTRAS = ("train", "qlora", "grpo", "test")
OLDEST_TO_PATCH = "transformers==5.4.0"
TESTS_OF_PATCHING = (
    "tests/patching/test_apply.py",
    "tests/patching/test_rope.py",
    "tests/liger/test_apply.py",
    # Its OLMo configurations take no `tie_word_embeddings: false`, and DeepSeek's experts have another class.
    "--deselect=tests/liger/test_apply.py::test_given_a_model[olmo2]",
    "--deselect=tests/liger/test_apply.py::test_without_a_model_those_built_later[olmo2]",
    "--deselect=tests/liger/test_apply.py::test_models_of_new_functions[olmo3]",
    "--deselect=tests/liger/test_apply.py::test_models_of_new_functions[deepseek_v3]",
)
SETS = ("oldest", "newest", "patching")
RECORD = ROOT / "tests/compat/newest.json"
SHOW = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def dependencies() -> list[str]:
    """The names of all that the trainers and the tests need here."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*extras["dependencies"], *(line for extra in EXTRAS for line in extras["optional-dependencies"][extra])]
    needed = [Requirement(line) for line in lines]
    return sorted(
        {item.name for item in needed if item.name != "liger-trainer" and (not item.marker or item.marker.evaluate())}
    )


def requirements(which: str, libraries: list[str]) -> list[str]:
    """What pip is to install: the lower bounds themselves, all that the bounds allow, or what patching needs."""
    if which == "patching":
        return [OLDEST_TO_PATCH]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    declared = [Requirement(line) for line in lines]
    found = {item.name: item.specifier for item in declared if item.name in libraries}
    if which == "newest":
        return [f"{name}{specifier}" for name, specifier in found.items()]
    bounds = {name: next(one.version for one in given if one.operator == ">=") for name, given in found.items()}
    return [f"{name}=={version}" for name, version in bounds.items()]


def run(which: str, libraries: list[str], keep: list[str], reuse: bool, whole: bool, arguments: list[str]) -> int:
    """Makes the environment and runs the tests in it; returns pytest's exit status."""
    folder = ROOT / f".venv-{which}"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    kept = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in keep]
    wanted = [*kept, *requirements(which, [name for name in libraries if name not in keep])]
    install = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", *wanted]
    if reuse or which == "patching":  # everything else comes from the environment that runs this script
        subprocess.run(install if which == "patching" else [*install, "--no-deps"], check=True, cwd=ROOT)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "reused.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    else:
        subprocess.run([*install, "-e", ".[test]"], check=True, cwd=ROOT)
    shown = subprocess.run([str(python), "-c", SHOW, *dependencies()], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(shown.stdout)
    print(", ".join(f"{name} {versions[name]}" for name in LIBRARIES), flush=True)
    tests: tuple[str, ...] = TESTS_OF_PATCHING if which == "patching" else TESTS
    runs: list[tuple[dict[str, str], tuple[str, ...]]] = [({}, tests)]
    if whole:
        spread = ("-n", "2", "--dist", "loadfile")
        runs = [
            ({}, (*spread, "tests")),
            ({"TRITON_INTERPRET": "1"}, (*spread, "-m", "kernel", "tests/kernels", "tests/liger")),
        ]
    for variables, chosen in runs:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        command = [str(python), "-m", "pytest", *chosen, *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if status:
            return status
    if whole and which == "newest" and not reuse and not arguments:
        RECORD.write_text(recorded(versions), encoding="utf-8")
    return 0


def recorded(versions: dict[str, str]) -> str:
    """What is written of a run that passed: the day in UTC, Python, and the versions of all dependencies."""
    public = {name.lower(): version.partition("+")[0] for name, version in versions.items()}
    run = {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "python": platform.python_version(),
        "versions": public,
    }
    return json.dumps(run, indent=2) + "\n"


def main() -> int:
    """Runs what the command line asks for; returns 0 where all tests pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--reuse", action="store_true", help="take all other packages from this environment")
    parser.add_argument(
        "--keep", nargs="+", choices=LIBRARIES, default=[], help="at their versions here, such as torch"
    )
    parser.add_argument("--whole", action="store_true", help="run all tests")
    ours, for_pytest = parser.parse_known_args()
    return max(run(which, ours.libraries, ours.keep, ours.reuse, ours.whole, for_pytest) for which in ours.versions)


if __name__ == "__main__":
    sys.exit(main())
