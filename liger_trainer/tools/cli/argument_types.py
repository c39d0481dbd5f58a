"""Argument types that the subcommands share; each turns the text of one argument into its value."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def share(text: str) -> float:
    """A number between 0 and 1, neither of them included."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


def token_range(text: str) -> str:
    """A number of tokens, or the least and the most of them with a colon between, as it was given."""
    low, colon, high = text.partition(":")
    bounds = [low, *([high] if colon else [])]
    if not all(bound.isdecimal() for bound in bounds) or not 1 <= int(bounds[0]) <= int(bounds[-1]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a range such as 64:1024 nor a number of tokens")
    return text


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def counts(text: str) -> list[int]:
    """Whole numbers of 1 or more, separated by commas."""
    return [positive(name) for name in names(text)]


def memory_size(text: str) -> int:
    """Bytes, from a size with its unit, such as 80GB or 24GiB."""
    from liger_trainer.configs.kernel_config import parse_bytes

    try:
        size = parse_bytes(text, "--gpu_memory")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 80GB or 24GiB") from None
    if size < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is {size} bytes; give a size with its unit, such as 80GB or 24GiB")
    return size
