"""The quantisation settings that ModelOpt writes into a file of their own, where a checkpoint's configuration has none.

transformers does not read the file. Of a repository on the Hub it is read where it lies in the cache, as after
``hf download``; the Hub is not asked for it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

FILE = "hf_quant_config.json"


def settings_of_file(
    name: str, revision: str | None = None, cache_dir: str | None = None, subfolder: str = ""
) -> dict[str, Any] | None:
    """What `FILE` says, as a `quantization_config` does; None without the file, and if it leaves weights in 16 bits.

    Args:
        name: A folder, or a name on the Hub.
        revision: The revision on the Hub.
        cache_dir: The cache of the Hub; by default that of huggingface_hub.
        subfolder: Where the checkpoint lies in the folder or the repository.

    Raises:
        ValueError: If the file cannot be read.
    """
    place = {"revision": revision, "cache_dir": cache_dir, "subfolder": subfolder}
    try:
        path = Path(str(cached_file(name, FILE, local_files_only=True, **place)))
    except OSError:  # there is none
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        return {"quant_method": "modelopt", **settings} if settings.get("quant_algo") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} must be the JSON that ModelOpt writes, with `quantization`, and cannot be read "
            f"({type(error).__name__}). Copy it again."
        ) from error


@contextlib.contextmanager
def settings_of_files() -> Iterator[None]:
    """Configurations that transformers reads inside the context have what `FILE` says, where they say nothing."""
    native = PreTrainedConfig.__dict__["get_config_dict"]

    def read(cls: type[PreTrainedConfig], name: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        place = {key: options[key] for key in ("revision", "cache_dir", "subfolder") if options.get(key)}
        config, unused = native.__get__(None, cls)(name, **options)
        nested = config.get("text_config") or {}
        if config and not any(each.get("quantization_config") for each in (config, nested)):
            settings = settings_of_file(str(name), **place)
            config = config if settings is None else {**config, "quantization_config": settings}
        return config, unused

    PreTrainedConfig.get_config_dict = classmethod(read)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        PreTrainedConfig.get_config_dict = native  # type: ignore[method-assign]
