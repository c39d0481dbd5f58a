"""Runs what applies of Liger's own tests with the names of liger_trainer, on the CPU or on a GPU.

    python -m tests.peers.run_liger [--archive liger_kernel-0.8.5.tar.gz] [arguments of pytest]

Liger's source distribution is downloaded by name with pip, or taken from a file where there is no network. Nothing of
it is built or installed, and only its tests are unpacked. `liger_table` says which apply, and where we differ.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tarfile

from tests.peers.liger_table import FILES, NOT_APPLICABLE, VERSION

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"


def _downloaded() -> pathlib.Path:
    archive = FOLDER / f"liger_kernel-{VERSION}.tar.gz"
    if not archive.exists():
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(FOLDER)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"liger-kernel=={VERSION}"], check=True)
    return archive


def _unpacked(archive: pathlib.Path) -> pathlib.Path:
    """The folder that holds Liger's folder `test`, of which every file is listed in the table."""
    folder = FOLDER / f"liger_kernel-{VERSION}"
    with tarfile.open(archive) as packed:
        tests = [member for member in packed.getmembers() if member.name.startswith(f"{folder.name}/test/")]
        packed.extractall(FOLDER, members=tests, filter="data")
    names = {path.relative_to(folder / "test").as_posix() for path in (folder / "test").rglob("test_*.py")}
    listed = {name for name in names if name in FILES or name in NOT_APPLICABLE or name.split("/")[0] in NOT_APPLICABLE}
    if names != listed or not names.issuperset(FILES):
        sys.exit(f"{archive} and tests/peers/liger_table.py list other files: {sorted(names ^ (listed | set(FILES)))}")
    return folder


def main() -> int:
    """The exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=pathlib.Path, help="Liger's source distribution; downloaded by default.")
    arguments, rest = parser.parse_known_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = _unpacked(arguments.archive or _downloaded())
    # Neither our configuration of pytest nor Liger's, which would put its source on the path.
    options = ["-q", "-rfEX", "--tb=short", "-W", "ignore", "-c", os.devnull, "--rootdir", str(folder)]
    options += ["-p", "no:cacheprovider", "-p", "tests.peers.liger_names"]
    files = [] if any(argument.startswith("test/") for argument in rest) else [f"test/{name}" for name in FILES]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *rest, *files]
    return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
