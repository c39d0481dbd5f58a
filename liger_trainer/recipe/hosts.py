"""What all processes of a run agree on before it trains: no error of one alone, one recipe, and the same rows.

Each host reads its own copy of the recipe, the packages and the data. Where they differ, collectives wait for ever, or
the run trains on something that nobody has asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from transformers.trainer_utils import SaveStrategy

from liger_trainer._version import __version__
from liger_trainer.errors import UserError
from liger_trainer.recipe.experts import splits_of_launch
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.load import Recipe
from liger_trainer.trainers.checkpoints.whole import LOCK

logger = logging.getLogger(__name__)

_PACKAGES = (
    *("torch", "transformers", "trl", "accelerate", "peft", "datasets", "tokenizers", "triton", "deepspeed"),
    *("bitsandbytes", "safetensors"),
)
_OF_A_PROCESS = ("local_rank", "logging_dir")  # fields that differ between the processes of one recipe
_ROWS = 64  # which are compared
_SHARED_WITHIN = 10.0  # seconds in which a file of one host shows on the others; NFS caches what a folder holds


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around work of every process without communication: an error of one that its user can correct is one of all.

    Otherwise the others would wait for that process in their next collective.
    """
    error = None
    try:
        yield
    except UserError as raised:
        error = raised
    if PartialState().num_processes == 1:
        if error is not None:
            raise error
        return
    where = f"rank {PartialState().process_index} on {socket.gethostname()}"
    found = gather_object([(where, None if error is None else str(error))])
    of_others = next(((where, text) for where, text in found if text is not None), None)
    if error is not None:
        raise error
    if of_others is not None:
        raise RecipeError(f"{of_others[0]}: {of_others[1]}")


def check_same_recipe(recipe: Recipe) -> None:
    """Refuses processes with different keys of the recipe, or different versions of the packages."""
    owners = (recipe.recipe, recipe.data, recipe.mixture, recipe.model, recipe.training, recipe.more)
    keys = {
        f"`{field.name}`": str(getattr(owner, field.name))
        for owner in owners
        if owner is not None
        for field in dataclasses.fields(owner)
        if field.init and field.name not in _OF_A_PROCESS
    }
    _check_same(keys, "give all hosts the same recipe and the same options")
    versions = {"Python": platform.python_version(), "liger_trainer": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    _check_same(versions, "install the same versions on all hosts")


def check_same_rows(name: str, rows: Any) -> None:
    """Refuses processes with different data, by its length and some of its rows."""
    if PartialState().num_processes == 1 or rows is None:
        return
    if isinstance(rows, Dataset):
        number = str(len(rows))
        chosen = [rows[index * (len(rows) - 1) // max(1, _ROWS - 1)] for index in range(min(_ROWS, len(rows)))]
    else:
        number, chosen = "unknown", list(itertools.islice(rows, 1))
    text = json.dumps(chosen, sort_keys=True, default=lambda value: type(value).__name__)  # pictures by their type
    found = {f"The number of rows of the {name} data": number, f"The {name} data": _digest(text)}
    _check_same(found, "give all hosts the same files")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check_same(facts: Mapping[str, str], advice: str) -> None:
    """Raises, in all processes, for the first fact of any process that is not that of the first one."""
    if PartialState().num_processes == 1:
        return
    (first, wanted), *others = gather_object([(socket.gethostname(), dict(facts))])
    for rank, (host, found) in enumerate(others, start=1):
        for key in (*wanted, *(found.keys() - wanted.keys())):
            here, there = wanted.get(key, "missing"), found.get(key, "missing")
            if here != there:
                raise RecipeError(
                    f"{key} is {here} on {first}, and {there} on {host} (rank {rank}): all processes of a run must "
                    f"have the same; {advice}."
                )


def check_shared(recipe: Recipe) -> None:
    """Refuses hosts that do not share ``output_dir`` and would not save on each of them; call it inside `owned`.

    A checkpoint of theirs would be whole on none of them: the first writes the model, and each process its own part.
    """
    args = recipe.training
    hosts = gather_object([socket.gethostname()])
    if len(set(hosts)) == 1 or args.save_on_each_node or args.save_strategy == SaveStrategy.NO:
        return
    lock = Path(str(args.output_dir)) / LOCK
    (written, *_) = gather_object([_text(lock)])
    if not written:
        return  # the file system has no locks
    until = time.monotonic() + _SHARED_WITHIN
    while not (seen := _text(lock) == written) and time.monotonic() < until:
        time.sleep(0.1)
        os.listdir(lock.parent)
    alone = next((host for host, sees in zip(hosts, gather_object([seen]), strict=True) if not sees), None)
    if alone is not None:
        split = splits_of_launch() == "FSDP" or recipe.recipe.expert_parallel_size > 1
        each = "" if split else ", or set `save_on_each_node: true`"
        raise RecipeError(
            f"`output_dir` is {str(lock.parent)!r}, which {alone} does not share with {hosts[0]}: no host would have a "
            f"whole checkpoint. Give a folder that all hosts share{each}."
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
