"""Writes liger_signatures.json, what Liger's users can import and call, from the source in a wheel of Liger's.

    python -m tests.peers.record_signatures liger_kernel-0.8.5-py3-none-any.whl

Nothing of the wheel is imported or executed: its files are parsed.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import re
import sys
import zipfile

FILE = pathlib.Path(__file__).with_name("liger_signatures.json")
# Modules whose classes and functions with a name of Liger's are called from outside.
FOLDERS = ("chunked_loss", "ops", "ops/experimental", "transformers", "transformers/experimental", "transformers/model")
ALSO = ("GrpoLossFunction", "fused_selective_log_softmax", "triton_grpo_loss", "_apply_liger_kernel")
ALSO += ("_apply_liger_kernel_to_instance", "fixed_fused_linear_cross_entropy", "unpack_cross_entropy_result")
CALLED = re.compile(r"Liger|apply_liger_kernel_to_|liger_\w+(?<!_kernel)(?<!_[fb]wd)$")
NOT_CALLED = ("liger_kernel/transformers/model/output_classes.py",)


def _signature(function: ast.FunctionDef, constants: dict[str, str]) -> str:
    """The parameters as `name`, `name=default`, `*`, or `**name`, without what Python or autograd passes."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = []
    for argument, default in zip(plain, defaults, strict=True):
        if argument.arg not in ("self", "cls", "ctx"):
            found.append(_parameter(argument, default, constants))
    if arguments.vararg or arguments.kwonlyargs:
        found.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument, default, constants))
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return ", ".join(found)


def _parameter(argument: ast.arg, default: ast.expr | None, constants: dict[str, str]) -> str:
    if default is None:
        return argument.arg
    text = ast.unparse(default)
    return f"{argument.arg}={constants.get(text, text)}"


def _signatures(tree: ast.Module) -> dict[str, str]:
    constants = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (CALLED.match(node.name) or node.name in ALSO):
            continue
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _signature(node, constants)
            continue
        methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
        for name in ("__init__", "forward"):
            if name in methods:
                found[f"{node.name}.{name}"] = _signature(methods[name], constants)
    return found


def _value(tree: ast.Module, name: str) -> ast.expr:
    (node,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)
    return node


def record(wheel: zipfile.ZipFile) -> dict[str, object]:
    """Liger's version, its table of model types, its `__all__`, and the signatures by module."""
    files = [pathlib.PurePosixPath(name) for name in wheel.namelist() if name.endswith(".py")]
    trees = {
        file: ast.parse(wheel.read(str(file)))
        for file in files
        if str(file.parent).removeprefix("liger_kernel/") in FOLDERS and str(file) not in NOT_CALLED
    }
    package = pathlib.PurePosixPath("liger_kernel")
    table = _value(trees[package / "transformers/monkey_patch.py"], "MODEL_TYPE_TO_APPLY_LIGER_FN")
    assert isinstance(table, ast.Dict)
    exported = trees[package / "transformers/__init__.py"]
    more = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(exported)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "__all__.extend"
    ]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): tree for file, tree in trees.items()}
    signatures = {module: _signatures(tree) for module, tree in sorted(modules.items())}
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return {
        "version": metadata.split("-")[1].removesuffix(".dist"),
        "model_types": {
            ast.literal_eval(key): ast.unparse(value) for key, value in zip(table.keys, table.values, strict=True)
        },
        "all": sorted([*ast.literal_eval(_value(exported, "__all__")), *(name for names in more for name in names)]),
        "signatures": {module: found for module, found in signatures.items() if found},
    }


def main() -> int:
    """Writes the file beside this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    with zipfile.ZipFile(parser.parse_args().wheel) as wheel:
        FILE.write_text(json.dumps(record(wheel), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
