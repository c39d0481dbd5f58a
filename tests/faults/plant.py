"""Plants deliberate faults in a copy of the repository and asks whether the tests see them.

`tests.faults.faults` lists the faults: each is one small replacement in a function, a class, a constant or a recipe,
and the tests that must fail. A fault is found by the name of what it is in, through the whole tree, and its tests by
their names, so files may move. ``python -m tests.faults.plant --help`` lists the options.

Of a fault's tests, the cases run that `make test` runs (`tests.selection`): what is caught here is caught there.
A fault counts as caught when a test fails; an error of the collection does not count. With ``--clean`` the same tests
run without the fault first, where all must pass; only then an error of a fixture, such as processes that end by their
time limit, counts too.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import dataclasses
import functools
import importlib
import itertools
import multiprocessing
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SOURCES = ("kernels", "callbacks", "configs", "benchmarks", "liger_trainer")
LIBRARIES = (
    *("torch", "triton", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "hypothesis"),
    *("transformers.models.auto.modeling_auto", "transformers.trainer", "accelerate", "datasets", "peft"),
    *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer"),
)
"""What is imported once, before the processes are forked that run the tests."""
LIMIT = 600
"""Seconds after which the tests of one fault are given up."""
IN_FIXTURE = 100
"""The status where a fixture failed alone: processes may wait for each other by the fault, or be late."""


class PlantingError(Exception):
    """A fault or its tests cannot be found."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests said of one fault."""

    fault: Fault
    word: str
    seconds: float
    detail: str


def copy_tree(source: Path, target: Path) -> None:
    """Copies the files that git tracks or would track, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=source, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = source / name
        if path.is_symlink() or path.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / name, follow_symlinks=False)


@functools.cache
def _texts(tree: Path, *folders: str) -> dict[Path, str]:
    """The Python files of `folders`; where there is a fault, it is taken out before the next is looked for."""
    walks = (os.walk(tree / folder) for folder in folders)  # which follow no links
    paths = (Path(parent, name) for walk in walks for parent, _, names in walk for name in sorted(names))
    return {path: path.read_text(encoding="utf-8") for path in paths if path.suffix == ".py"}


@functools.cache
def _definitions(text: str) -> dict[str, list[ast.stmt]]:
    """Every definition in a file, by its name."""
    found: dict[str, list[ast.stmt]] = {}
    for node in ast.walk(ast.parse(text)):
        for name in _names(node):
            found.setdefault(name, []).append(node)
    return found


@functools.cache
def _files_of(tree: Path) -> dict[str, list[str]]:
    """The files of the tests that define each function."""
    found: dict[str, list[str]] = {}
    for path, text in _texts(tree, "tests").items():
        for function in set(re.findall(r"^def (\w+)\(", text, re.MULTILINE)):
            found.setdefault(function, []).append(str(path.relative_to(tree)))
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _spans(text: str, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and last lines of every definition of ``names[0]``, in it of ``names[1]``, and so on."""
    nodes = _definitions(text).get(names[0], [])
    for name in names[1:]:
        nodes = [inner for node in nodes for inner in ast.walk(node) if inner is not node and name in _names(inner)]
    yield from ((node.lineno, node.end_lineno or node.lineno) for node in nodes)


def planted(fault: Fault, tree: Path) -> tuple[Path, str]:
    """The file of `tree` that `fault` is in, and its text with the fault.

    Raises:
        PlantingError: if the text to be replaced is not there, or there more than once.
    """
    found: list[tuple[Path, str]] = []
    if fault.where.endswith(".yaml"):
        path = tree / fault.where
        text = path.read_text(encoding="utf-8")
        found = [(path, _replaced(fault, text, match)) for match in re.finditer(fault.old, text, re.MULTILINE)]
    else:
        for path, text in _texts(tree, *SOURCES).items():
            if fault.where.split(".")[-1] not in text:
                continue
            starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
            for first, last in set(_spans(text, fault.where.split("."))):
                matches = re.compile(fault.old, re.MULTILINE).finditer(text, starts[first - 1], starts[last])
                found.extend((path, _replaced(fault, text, match)) for match in matches)
    if len(found) != 1:
        raise PlantingError(f"`{fault.old}` is {len(found)} times in `{fault.where}`, and must be there once")
    return found[0]


def _replaced(fault: Fault, text: str, match: re.Match[str]) -> str:
    return text[: match.start()] + match.expand(fault.new) + text[match.end() :]


def selected(tests: Sequence[str], tree: Path) -> list[str]:
    """The tests ``part_of_the_path::function`` as pytest has them.

    Raises:
        PlantingError: if one is not there.
    """
    selection: list[str] = []
    for test in tests:
        part, _, function = test.partition("::")
        names = [f"{path}::{function}" for path in _files_of(tree).get(function, ()) if part in path[6:]]
        if not names:
            raise PlantingError(f"no test {test}")
        selection += names
    return selection


def run_tests(selection: Sequence[str], tree: Path, expression: str = "") -> tuple[int, str]:
    """Runs pytest on `selection` in `tree`: its exit status, and the first test that failed or the last line.

    In a process that is forked from this one, which has imported the libraries.
    """
    arguments = ["-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--part", "selected", *selection]
    arguments += ["-k", expression] if expression else []
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process == 0:
            _become_pytest(arguments, tree, output.fileno())
        status = _status_of(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or [""]
    if status is None:
        return -1, f"no end after {LIMIT} s"
    failed = [line for line in lines if line.startswith("FAILED")]
    if status == 1 and not failed:
        status = IN_FIXTURE
    return status, (failed or lines[-1:])[0][:160]


def _become_pytest(arguments: list[str], tree: Path, output: int) -> NoReturn:
    """Runs pytest in this process, which ends with it."""
    code = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        sys.modules["__main__"] = types.ModuleType("__main__")  # which processes of the tests would import
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True  # a file that changes twice in a second would be taken for the one before
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _status_of(process: int) -> int | None:
    """The exit status of the leader of a process group, which is killed and has none after `LIMIT` seconds."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def found(fault: Fault, tree: Path) -> Outcome:
    """Whether `fault` and its tests are in `tree`."""
    try:
        path, _ = planted(fault, tree)
        selected(fault.tests.split(), tree)
    except PlantingError as error:
        return Outcome(fault, "NOT FOUND", 0.0, str(error))
    return Outcome(fault, "found", 0.0, str(path.relative_to(tree)))


def tried(fault: Fault, tree: Path, clean: bool) -> Outcome:
    """Plants `fault` in `tree`, runs its tests, and takes it out again."""
    start = time.monotonic()
    try:
        path, text = planted(fault, tree)
        selection = selected(fault.tests.split(), tree)
    except PlantingError as error:
        return Outcome(fault, "NOT PLANTED", 0.0, str(error))
    if clean:
        status, detail = run_tests(selection, tree, fault.expression)
        if status != 0:
            return Outcome(fault, "FAILS CLEAN", time.monotonic() - start, detail)
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        status, detail = run_tests(selection, tree, fault.expression)
    finally:
        path.write_text(before, encoding="utf-8")
    word = {0: "NOT CAUGHT", 1: "caught", IN_FIXTURE: "caught" if clean else "UNCLEAR"}.get(status, f"ERROR {status}")
    return Outcome(fault, word, time.monotonic() - start, detail)


def tried_all(faults: Sequence[Fault], options: argparse.Namespace) -> list[Outcome]:
    """Tries `faults`, each in a copy of the tree, and prints a line for each."""
    with contextlib.ExitStack() as stack:
        trees = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))) for _ in range(options.jobs)]
        for tree in trees:
            copy_tree(options.tree, tree)
            # Compiled code is valid by the text of its file, not by its time.
            compileall.compile_dir(tree, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        outcomes = []
        parts = [(faults[index :: options.jobs], tree) for index, tree in enumerate(trees)]
        context = multiprocessing.get_context("fork")
        lines = context.SimpleQueue()
        workers = [context.Process(target=_try_each, args=(*part, options, lines)) for part in parts]
        for worker in workers:
            worker.start()
        for _ in faults:
            outcome = lines.get()
            print(
                f"{outcome.word:12} {outcome.fault.kind:10} {outcome.fault.name:60} {outcome.seconds:5.0f} s  "
                f"{outcome.detail}",
                flush=True,
            )
            outcomes.append(outcome)
        for worker in workers:
            worker.join()
    return outcomes


def _try_each(faults: Sequence[Fault], tree: Path, options: argparse.Namespace, lines: Any) -> None:
    for fault in faults:
        lines.put(found(fault, tree) if options.check else tried(fault, tree, options.clean))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the faults; the exit status is 0 if all were caught."""
    parser = argparse.ArgumentParser(description="Plant deliberate faults and see whether the tests catch them.")
    parser.add_argument("names", nargs="*", help="faults or kinds of faults (default: all)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy and test (default: this one)")
    parser.add_argument("--clean", action="store_true", help="run the tests without the fault first")
    parser.add_argument("--check", action="store_true", help="only say whether every fault and test is found")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {name for fault in FAULTS for name in (fault.name, fault.kind)}
    if unknown:
        parser.error(f"no fault or kind is called {', '.join(map(repr, sorted(unknown)))}")
    faults = [fault for fault in FAULTS if not options.names or {fault.name, fault.kind} & set(options.names)]
    kernels = [] if options.check else [fault for fault in faults if fault.kind == "kernel"]
    missed, interpreted = 0, os.environ.get("TRITON_INTERPRET") == "1"
    if kernels and not interpreted:  # Triton interprets in a whole process or not at all
        faults = [fault for fault in faults if fault not in kernels]
        own = ["--clean"] if options.clean else []
        command = [sys.executable, "-m", "tests.faults.plant", *own, f"--tree={options.tree}", f"--jobs={options.jobs}"]
        command += [fault.name for fault in kernels]
        missed += subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    if not options.check:
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    outcomes = tried_all(faults, options) if faults else []
    good = "found" if options.check else "caught"
    missed += sum(outcome.word != good for outcome in outcomes)
    if outcomes:
        print(f"{sum(outcome.word == good for outcome in outcomes)} of {len(outcomes)} {good}")
    return min(missed, 100)


if __name__ == "__main__":
    sys.exit(main())
