"""The layout of the repository that Hugging Face's own `kernels` package asks for."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "callbacks", "configs", "recipes", "benchmarks")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_init_in_top_level_folders(folder):
    # As a regular package it would shadow, in the working directory, Hugging Face's `kernels` or anybody's `configs`.
    assert not (ROOT / folder / "__init__.py").exists()


def test_nothing_imports_the_folders_by_their_bare_names():
    # `import kernels.x` would load a second copy of the module beside `liger_trainer.kernels.x`.
    for folder in ("liger_trainer", *FOLDERS, "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                words = line.split()
                if len(words) > 1 and words[0] in ("import", "from"):
                    assert words[1].split(".")[0] not in FOLDERS, f"{path.relative_to(ROOT)}: {line}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_top_level_folder_is_a_subpackage(folder):
    link = ROOT / "liger_trainer" / folder
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("name", ["tests", "docs", "examples", "liger_trainer"])
def test_other_folders_are_no_subpackages(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"liger_trainer.{name}")


def test_types_hold_across_folders():
    code = (
        "from liger_trainer.configs.kernel_config import KernelConfig\n"
        "from liger_trainer.functional import rms_norm\n"
        "reveal_type(rms_norm)\n"
        "reveal_type(KernelConfig.rms_norm)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    function, flag = re.findall(r'Revealed type is "(.*)"', run.stdout)
    assert function.startswith("def (x: torch._tensor.Tensor, weight: torch._tensor.Tensor | None"), run.stdout
    assert flag == "bool", run.stdout


def product_modules():
    """Every module of the product by its name; the sweeps, which the wheel leaves out, too."""
    files = [path for folder in ("liger_trainer", *FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    names = {}
    for path in files:  # rglob does not follow the links in liger_trainer/
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "liger_trainer" else ("liger_trainer", *parts)
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def imports(path, modules):
    """The modules that a file imports, at its top, in a function, or for its types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: relative import"
            ours = (node.module or "").startswith("liger_trainer.")
            assert not ours or any(f"{known}.".startswith(f"{node.module}.") for known in modules), (path, node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from (known for known in ([name] if name in modules else [node.module]) if known in modules)


def test_imports_have_no_circle():
    modules = product_modules()
    after = {name: set(imports(path, modules)) - {name} for name, path in modules.items()}
    assert len(after["liger_trainer.functional"]) > 10, "the imports are not found"
    left = dict(after)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    while free := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in free:  # they import a circle and are no part of one
            del left[name]
    assert not left, f"in circles or between two: {sorted(left)}"


REEXPORTS = re.compile(r"liger_trainer(\.(cli|functional|nn|losses(\..*)?|__main__))?")
"""Modules with public names, which the core does not import."""
OUTER = {"liger", "integrations", "benchmarks", "tools"}


def package_of(module, modules):
    """The row of docs/architecture.md for a module: a folder, or a file beside the folders."""
    if REEXPORTS.fullmatch(module):
        return "a re-export"
    _, first, *more = module.split(".")
    if not more and modules[module].parent.name == "liger_trainer":
        return f"{first}.py"
    return f"kernels/{more[0]}" if first == "kernels" and len(more) > 1 else first


def table_of_packages():
    """Package -> (packages that it may import, libraries; None for any), in the order of the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = {}
    for name, allowed, libraries in re.findall(r"^\| `([\w/.]+?)/?` \|.*\| (.*) \| (.*) \|$", page, re.MULTILINE):
        packages = set(allowed.split(", ")) - {"–"}
        if "the core" in packages:
            packages = packages - {"the core"} | rows.keys() - OUTER | {"a re-export"}
        rows[name] = (packages, None if libraries == "any" else set(libraries.split(", ")) - {"–"})
    return rows


def test_packages_import_the_packages_of_their_row():
    modules, rows = product_modules(), table_of_packages()
    found = {package: set() for package in rows}
    for module, path in modules.items():
        package = package_of(module, modules)
        assert package in {*rows, "a re-export"}, f"docs/architecture.md has no row for {package}, of {module}"
        if package != "a re-export":
            found[package] |= {package_of(name, modules) for name in imports(path, modules)} - {package}
    for package, (allowed, libraries) in rows.items():
        assert found[package] <= allowed, (
            f"{package} imports {sorted(found[package] - allowed)}, which its row does not name"
        )
        if libraries is not None:
            assert allowed == found[package], (
                f"the row of {package} names {sorted(allowed - found[package])}, not imported"
            )


def named_modules(path, modules):
    """The modules of ours that a file names in a text, from which it may import them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        value = node.value.partition(":")[0] if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if value.startswith("liger_trainer.") and value in modules:
            yield value
        is_import = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))
        if is_import and "liger_trainer" in [getattr(argument, "value", "") for argument in node.args]:
            yield "liger_trainer"


BY_NAME = {("compat", "tools"), ("recipe", "a re-export")}
"""Imports that only a run of the code makes: a canary is tried, and a recipe finds its trainer among the exports."""


def test_the_core_imports_nothing_else_by_a_name_in_a_text():
    modules, rows = product_modules(), table_of_packages()
    found = set()
    for module, path in modules.items():
        package = package_of(module, modules)
        if package in rows and package not in OUTER:
            named = {package_of(name, modules) for name in named_modules(path, modules)} - {package}
            found |= {(package, other) for other in named - rows[package][0]}
    assert found == BY_NAME


def test_packages_are_in_no_circle_and_the_core_imports_no_outer_one():
    above = {"a re-export"}
    for package, (allowed, libraries) in table_of_packages().items():
        assert allowed <= above, f"{package} may import {sorted(allowed - above)}, which does not stand above it"
        assert (libraries is None) == (package in OUTER)
        assert package in OUTER or not allowed & {*OUTER, "a re-export"}, package
        above.add(package)
    assert above > OUTER


def test_packages_import_the_libraries_of_their_row():
    modules, rows = product_modules(), table_of_packages()
    found = {package: set() for package in (*rows, "a re-export")}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            found[package_of(module, modules)].update(name.split(".")[0] for name in names)
    for package, (_, libraries) in rows.items():
        if libraries is not None:
            assert found[package] - sys.stdlib_module_names - {"liger_trainer"} == libraries, package


def test_subpackages_come_from_the_source_tree():
    from liger_trainer.kernels import runtime

    assert pathlib.Path(runtime.__file__).resolve() == ROOT / "kernels" / "runtime.py"


@pytest.mark.parametrize("installed", [False, True])
def test_transformers_models_import_in_the_working_directory(tmp_path, installed):
    """With the folder `kernels/` on the path, and with a distribution called `kernels` or without one."""
    path = [str(ROOT)]
    if installed:
        package, metadata = tmp_path / "kernels", tmp_path / "kernels-0.1.0.dist-info"
        package.mkdir()
        metadata.mkdir()
        (package / "__init__.py").write_text("__version__ = '0.1.0'\n")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n")
        path.append(str(tmp_path))
    code = (
        f"import sys; sys.path[:0] = {path!r}\n"
        "import transformers.models.llama.modeling_llama, liger_trainer.kernels.runtime\n"
        "import kernels\n"
        "print(getattr(kernels, '__version__', 'namespace'))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    # A regular package, wherever on the path, wins over a folder without __init__.py.
    assert run.stdout.split()[-1] == ("0.1.0" if installed else "namespace")
