"""Runs the parity tests with the oldest and the newest versions of the libraries that pyproject.toml allows.

A third set is the oldest transformers that models are patched with (docs/install.md), and the tests of patching; all
else comes from the environment that runs this script, since the extra `test` asks for a newer one. Each set gets a
virtual environment of its own, such as `.venv-oldest`. Arguments that are not known here go to pytest.
"""

from __future__ import annotations

import argparse
import os
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
    "tests/trainers/test_parity.py",
    "tests/trainers/test_parity_orpo_cpo.py",
    "tests/trainers/test_parity_distillation.py",
    "tests/trainers/test_stock_trainer.py",
    "tests/trainers/test_checkpoints.py",
    "tests/patching/test_apply.py",
    "tests/patching/test_rope.py",
)
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


def run(which: str, libraries: list[str], reuse: bool, arguments: list[str]) -> int:
    """Makes the environment and runs the tests in it; returns pytest's exit status."""
    folder = ROOT / f".venv-{which}"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", *requirements(which, libraries)]
    if reuse or which == "patching":  # everything else comes from the environment that runs this script
        subprocess.run(install if which == "patching" else [*install, "--no-deps"], check=True, cwd=ROOT)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "reused.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    else:
        subprocess.run([*install, "-e", ".[test]"], check=True, cwd=ROOT)
    show = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {LIBRARIES}), sep=', ')"
    subprocess.run([str(python), "-c", show], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    tests = TESTS_OF_PATCHING if which == "patching" else TESTS
    return subprocess.run([str(python), "-m", "pytest", *tests, *arguments], cwd=ROOT, env=environment).returncode


def main() -> int:
    """Runs what the command line asks for; returns 0 where all tests pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--reuse", action="store_true", help="take all other packages from this environment")
    ours, for_pytest = parser.parse_known_args()
    return max(run(which, ours.libraries, ours.reuse, for_pytest) for which in ours.versions)


if __name__ == "__main__":
    sys.exit(main())
