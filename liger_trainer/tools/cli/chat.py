"""``liger-trainer chat``: a conversation with the model of a run, in the terminal or through a pipe."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import add_run, positive
from liger_trainer.tools.cli.run_recipe import quiet_libraries

if TYPE_CHECKING:
    from liger_trainer.tools.export.conversation import Conversation


def temperature(text: str) -> float:
    """A number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "chat",
        help="talk to the model of a run",
        description="Answers messages with the model of a run, whole or with adapters. `/reset` forgets the "
        "conversation, `/exit` or Ctrl-C ends it. Without a terminal, each line of the input is a message, and each "
        "line of the output its answer, in which a line break is written as \\n.",
    )
    add_run(parser, "a model")
    parser.add_argument(
        "--max_new_tokens", type=positive, default=512, metavar="N", help="tokens of an answer, at most (default: 512)"
    )
    parser.add_argument(
        "--temperature", type=temperature, metavar="T", help="0 takes the likeliest token; default: the model's own"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.set_defaults(function=lambda arguments, _: chat(arguments))


def chat(arguments: Namespace) -> int:
    """Talks until the input ends; returns the exit code."""
    quiet_libraries()
    from liger_trainer.tools.export.conversation import open_conversation
    from liger_trainer.tools.export.saved_run import find_run

    run = find_run(arguments.run, arguments.base_model, arguments.trust_remote_code)
    conversation = open_conversation(run, arguments.max_new_tokens, arguments.temperature, arguments.system)
    if not conversation.has_template:
        print("The tokenizer has no chat template: the model continues plain text.", file=sys.stderr)
    try:
        (_talk if sys.stdin.isatty() else _answer_lines)(conversation)
    except KeyboardInterrupt:
        print()
    return 0


def _messages(lines: Iterator[str], conversation: Conversation) -> Iterator[str]:
    """The lines that are messages; the commands among them are followed."""
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            yield line


def _answer_lines(conversation: Conversation) -> None:
    for message in _messages(iter(sys.stdin), conversation):
        answer = "".join(conversation.answer(message))
        print(answer.strip().replace("\r", "").replace("\n", "\\n"), flush=True)


def _talk(conversation: Conversation) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print("[dim]/reset forgets the conversation; /exit, Ctrl-C or Ctrl-D ends it.[/dim]")
    for message in _messages(_typed(console), conversation):
        try:
            for part in conversation.answer(message):
                console.print(part, end="", markup=False, soft_wrap=True)
        except UserError as error:  # of this message; the conversation is as it was before
            console.print(str(error), style="red", markup=False)
        console.print()


def _typed(console: Any) -> Iterator[str]:
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except EOFError:
            console.print()
            return
