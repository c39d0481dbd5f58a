"""Commands that load a model print their own lines, and none of the libraries below that say nothing about it."""

from __future__ import annotations

import logging
import sys

from liger_trainer.tools.cli.run_recipe import prepare_libraries


def quiet_libraries() -> None:
    """To be called before the first import of a library that reads environment variables."""
    prepare_libraries()
    import torch

    if not torch.accelerator.is_available():
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel that is not used
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
