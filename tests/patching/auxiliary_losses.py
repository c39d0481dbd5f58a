"""Where the routers of [`tests.patching.test_records`] keep their losses: another file than theirs, as Megatron's."""

from __future__ import annotations

from typing import ClassVar

SAVED: list[object] = []


def save(value):
    """Keeps `value` in a global of this file."""
    SAVED.append(value)


class OfClass:
    """Keeps values in the class."""

    items: ClassVar[list[object]] = []

    @classmethod
    def add(cls, value):
        """Keeps `value`."""
        cls.items.append(value)


class Tracker:
    """An object that keeps values in a list."""

    def __init__(self):
        self.items = []

    def add(self, value):
        """Keeps `value`."""
        self.items.append(value)


class Slotted:
    """An object that keeps a value without a `__dict__`."""

    __slots__ = ("last",)

    def add(self, value):
        """Keeps `value`."""
        self.last = value


TRACKER = Tracker()
