"""The wheel and the sdist hold every module, recipe and launch file, and work without the source tree."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"liger_trainer": "liger_trainer"} | {
    name: f"liger_trainer/{name}" for name in ("kernels", "callbacks", "configs", "recipes", "benchmarks")
}


def project_file():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def build(kind, source, folder):
    """The wheel or sdist that the build backend makes of `source`."""
    command = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", command, folder], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.iterdir()
    return built


def held(wheel):
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy, so that builds leave nothing in the tree and take nothing along from earlier builds."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", "--no-dereference", ROOT / name, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_everything(wheel):
    expected = {"liger_trainer_as_liger.pth"}  # beside the package, where Python reads it at its start
    for folder, place in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):  # which does not follow the links in liger_trainer/
            # The sweeps choose launch configurations: tools for this repository alone.
            shipped = path.suffix in (".py", ".yaml", ".typed", ".pth") or path.name == "metadata.json"
            if shipped and path.is_file() and "sweeps" not in path.parts:
                expected.add(f"{place}/{path.relative_to(ROOT / folder)}")
    assert held(wheel) == sorted(expected)


def test_sdist_unpacks_and_builds_the_same_wheel(source, wheel, tmp_path):
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        names = [member.name for member in archive.getmembers()]
        assert len(names) == len(set(names))
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    # The links in liger_trainer/ have become folders, so the folders that they point to must not be there again.
    assert {path.name for path in unpacked.iterdir() if path.is_dir()} == {"liger_trainer", "liger_trainer.egg-info"}
    (tmp_path / "wheel").mkdir()
    assert held(build("wheel", unpacked, tmp_path / "wheel")) == held(wheel)


def test_startup_file_reaches_subprocesses(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(tmp_path / 'site')!r})")
    child = "import importlib.metadata as m; print(m.version('liger_kernel'))"
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "LIGER_TRAINER_AS_LIGER": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0.8.5\n", done.stderr
    environment["LIGER_TRAINER_AS_LIGER"] = "0"
    off = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "PackageNotFoundError" in off.stderr


def test_wheel_works_on_its_own(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import liger_trainer, liger_trainer.kernels.runtime, liger_trainer.functional\n"
        "from liger_trainer.recipe import load_recipe; from liger_trainer.recipe.file import shipped_recipes\n"
        "from liger_trainer.recipe.file import shipped_configs\n"
        "print(liger_trainer.__file__, len(shipped_recipes()), len(shipped_configs()))\n"
        "load_recipe('quickstart', ['--use_cpu', 'true'])\n"
        "from liger_trainer.benchmarks.registry import OPERATIONS, load_operations; load_operations()\n"
        "assert 'rms_norm' in OPERATIONS\n"
        "print(liger_trainer.__version__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    place, recipes, configs = done.stdout.splitlines()[0].split()
    assert Path(place).parent == tmp_path / "site" / "liger_trainer"
    assert int(recipes) == len(list((ROOT / "recipes").glob("*.yaml")))
    assert int(configs) == 6


def test_constraints_fit_the_declared_ranges():
    from packaging.requirements import Requirement

    project = project_file()["project"]
    declared = [Requirement(line) for line in project["dependencies"]]
    declared += [Requirement(line) for extra in project["optional-dependencies"].values() for line in extra]
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {Requirement(line).name.lower(): Requirement(line) for line in lines if line}
    for requirement in declared:
        if requirement.name == "liger-trainer":  # an extra of extras
            continue
        pin = pinned[requirement.name.lower()]
        for specifier in pin.specifier:
            if specifier.operator == "==":
                assert requirement.specifier.contains(specifier.version), requirement
