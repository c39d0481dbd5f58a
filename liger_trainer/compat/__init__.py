"""Every private name of other libraries that this package relies on, one file a library.

A name counts as private if its library does not document it: it starts with an underscore, lives in an internal or
experimental module, or is an internal method that we override. Each library's file groups the names by the feature of
ours that needs them. The code that provides a feature calls [`require`] or [`available`] (`private.py`) when it is
imported or built, so that a change in a library is an error or a warning, and never a silent difference.

To add one: declare it in the library's file, and call `require(FEATURE)` where it is used. The tests in `tests/compat`
find it by themselves.
"""

from __future__ import annotations

import importlib

from liger_trainer.compat.private import Feature

LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "torch", "transformers", "trl")
"""The libraries that have a file here."""


def features() -> list[Feature]:
    """Every feature that needs private names of what is installed, by library. The libraries are not imported."""
    modules = [importlib.import_module(f"{__name__}.{library}") for library in LIBRARIES]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Feature)]
    return [feature for feature in found if feature.applies]
