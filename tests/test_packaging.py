"""The wheel and the sdist hold every module, recipe and launch file, and work without the source tree."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.release_check import BESIDE, FOLDERS, in_the_archives, version_of

ROOT = Path(__file__).parent.parent


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
    for name in (*FOLDERS, *BESIDE, "MANIFEST.in", "tests"):
        subprocess.run(["cp", "-r", "--no-dereference", ROOT / name, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


def test_both_hold_everything_and_nothing_else(wheel, sdist, tmp_path):
    for archive in (wheel, sdist):
        shutil.copy(archive, tmp_path)
    assert list(in_the_archives(tmp_path, version_of(ROOT))) == []
    with zipfile.ZipFile(tmp_path / wheel.name, "a") as archive:
        archive.writestr("liger_trainer/left_over.py", "")
    assert list(in_the_archives(tmp_path, version_of(ROOT))) == [
        f"{wheel.name}: liger_trainer/left_over.py does not belong there"
    ]
    with tarfile.open(tmp_path / sdist.name, "w:gz"):
        pass  # an empty one
    missing = f"{sdist.name}: liger_trainer/kernels/norms/rms_norm.py is missing"
    assert missing in in_the_archives(tmp_path, version_of(ROOT))


def test_sdist_unpacks_and_builds_the_same_wheel(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers()]
        assert len(names) == len(set(names))
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    # The links in liger_trainer/ have become folders, so the folders that they point to must not be there again.
    assert {path.name for path in unpacked.iterdir() if path.is_dir()} == {"liger_trainer", "liger_trainer.egg-info"}
    (tmp_path / "wheel").mkdir()
    assert held(build("wheel", unpacked, tmp_path / "wheel")) == held(wheel)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_startup_file_reaches_subprocesses(kind, source, wheel, tmp_path):
    (tmp_path / "built").mkdir()
    installed = wheel if kind == "wheel" else build("editable", source, tmp_path / "built")
    zipfile.ZipFile(installed).extractall(tmp_path / "site")
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
