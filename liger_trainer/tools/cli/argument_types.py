"""Arguments that the subcommands share, and types of them; each turns the text of one argument into its value."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_trainer.tools.planning.cards import Card


def add_run(parser: argparse.ArgumentParser, holds: str) -> None:
    """Adds the arguments that name a run, or a folder with what it `holds`, and say how its model is loaded."""
    parser.add_argument(
        "run", metavar="RUN", help=f"the output folder of a run, a checkpoint, or a folder with {holds}"
    )
    parser.add_argument("--base_model", metavar="MODEL", help="the base model, if it is not where the adapters say")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")


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
    """Names, separated by commas, each once."""
    return [*dict.fromkeys(name.strip() for name in text.split(",") if name.strip())]


def counts(text: str) -> list[int]:
    """Whole numbers of 1 or more, separated by commas, each once."""
    return [*dict.fromkeys(positive(name) for name in names(text))]


def network(text: str) -> tuple[float, bool]:
    """Bytes a second of the network between hosts, and whether they are those of a whole host."""
    from liger_trainer.tools.planning.cards import network_rate

    rate = network_rate(text)
    if rate is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate; give that of a GPU, such as 400Gb/s or 50GB/s, or of a host, such as 3.2Tb/s/host"
        )
    return rate


def card(text: str) -> Card:
    """A card by its name, such as H100."""
    from liger_trainer.tools.planning.cards import CARDS, card_named

    found = card_named(text)
    if found is None:
        known = ", ".join(each.name for each in CARDS)
        raise argparse.ArgumentTypeError(f"{text!r} is not known; take the nearest of {known}")
    return found


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
