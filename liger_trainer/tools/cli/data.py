"""``liger-trainer data``: the rows of a file as the model will see them, and what is wrong with them."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import positive
from liger_trainer.tools.cli.run_recipe import prepare_libraries

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from liger_trainer.tools.diagnosis.sample import Sample
    from liger_trainer.tools.diagnosis.sample import Sequence as Tokens


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "data",
        help="rows of data as the model will see them: tokens, labels, lengths, duplicates",
        description="Reads data as `train` does and shows the first rows as the model will see them: their tokens, and "
        "which of them are labels. Then come lengths, what is cut off, duplicates and empty answers. Keys of a recipe "
        "are also options, such as --trainer dpo. No weights are loaded.",
        usage="liger-trainer data FILE_OR_RECIPE ... [--model MODEL] [--rows N] [--html FILE] [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "files",
        metavar="FILE_OR_RECIPE",
        nargs="+",
        help="files, patterns or folders of data, or a recipe (a YAML file, or the name of a shipped one)",
    )
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer to use: a Hub id or a folder")
    parser.add_argument("--rows", type=positive, default=3, metavar="N", help="how many rows to show (3)")
    parser.add_argument("--html", metavar="FILE", help="also write what is shown to an HTML page")
    parser.set_defaults(function=show)


def show(arguments: Namespace, options: Sequence[str]) -> int:
    """Prints the data of ``arguments.files``; returns the exit code.

    Raises:
        RecipeError: for data or keys that training would refuse too.
    """
    prepare_libraries(offline=False)
    from rich.console import Console

    from liger_trainer.tools.diagnosis.sample import CannotCheckError, converted_rows, read_sample

    if arguments.html is not None and Path(arguments.html).exists():
        raise UserError(f"`--html` is {arguments.html!r}, which is there already; give another name, or remove it.")
    if arguments.html is not None and not Path(arguments.html).parent.is_dir():
        raise UserError(f"`--html` is {arguments.html!r}, but there is no such folder; make it first.")
    console = Console(record=arguments.html is not None, highlight=False, soft_wrap=True)
    values, source = _values(arguments, options)
    rows = converted_rows(values, source)
    sample = None
    if values["model_name_or_path"] or values["tokenizer_name_or_path"] or values["tokenizer_vocab_size"]:
        try:
            sample = read_sample(_case(values, source))
        except CannotCheckError as error:
            raise UserError(f"The tokens cannot be shown: {error}") from error
    if sample is None or not sample.cut:
        for number, row in enumerate(islice(rows, arguments.rows), 1):
            console.print(f"\n[bold]Row {number}[/bold]")
            _print_row(console, row)
    else:
        _print_tokens(console, sample, arguments.rows)
    console.print()
    for line in summary(rows, sample, values.get("max_length")):
        console.print(line)
    if sample is None:
        console.print("`--model MODEL` shows tokens and labels.")
    if arguments.html is not None:
        console.save_html(arguments.html, clear=False)
        console.print(f"Written to {arguments.html}.")
    return 0


def _values(arguments: Namespace, options: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """The keys of the recipe that is given, or of one that trains on the files."""
    from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_recipes
    from liger_trainer.recipe.load import check_values
    from liger_trainer.recipe.schema import TRAINERS

    first = arguments.files[0]
    is_recipe = Path(first).suffix in (".yaml", ".yml") or first in shipped_recipes()
    if is_recipe and len(arguments.files) > 1:
        raise UserError(f"{first!r} is a recipe, which names its data; give it alone, or files of data.")
    source = find_recipe(first) if is_recipe else Path(first)
    written = read_recipe(source) if is_recipe else {"data_files": arguments.files}
    asked = {option.rpartition("=")[2] for option in options}
    if not is_recipe and any(kind.generates and trainer in asked for trainer, kind in TRAINERS.items()):
        written = {**written, "reward_funcs": ["liger_trainer.rewards:length"]}  # which reads no column
    if arguments.model is not None:
        written = {**written, "model_name_or_path": arguments.model}
    elif not is_recipe:
        written = {**written, "model_name_or_path": ""}
    values, _ = check_values(written, options, source)
    return values, source


def _case(values: Mapping[str, Any], source: Path) -> Any:
    from transformers import PreTrainedConfig

    from liger_trainer.tools.diagnosis.sample import Case

    return Case(source, values, PreTrainedConfig(), is_model=False)  # tokens do not depend on the model


def _print_row(console: Console, row: Mapping[str, Any]) -> None:
    from rich.text import Text

    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
            for turn in value:
                said = {key: each for key, each in turn.items() if key not in ("role", "content")}
                more = f" {json.dumps(said, ensure_ascii=False)}" if said else ""
                console.print(Text(f"  {name} · {turn.get('role')}: {_said(turn.get('content'))}{more}"))
        else:
            console.print(Text(f"  {name}: {value if isinstance(value, str) else json.dumps(value, default=str)}"))


def _said(content: Any) -> Any:
    """The content of a turn; of parts, their texts, with the kind of any other part in its place."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)


def _print_tokens(console: Console, sample: Sample, count: int) -> None:
    """The first sequences, each with its labels in green."""
    for side in dict.fromkeys(tokens.side for tokens in sample.cut):
        shown = islice((tokens for tokens in sample.cut if tokens.side == side), count)
        for number, tokens in enumerate(shown, 1):
            title = f"Row {number}{f', {side}' if side else ''}"
            labels = int(tokens.labelled.sum())
            console.print(f"\n[bold]{title}[/bold]: {len(tokens.ids)} tokens, [green]{labels} labels[/green]")
            console.print(coloured(tokens, sample.tokenizer))


def coloured(tokens: Tokens, tokenizer: Any) -> Text:
    """The text of a sequence; labels are green, and the other tokens dim."""
    from rich.text import Text

    text = Text()
    start = 0
    ids, labelled = tokens.ids.tolist(), tokens.labelled.tolist()
    for end in range(1, len(ids) + 1):  # runs are decoded whole: one token may be a part of a character
        if end == len(ids) or labelled[end] != labelled[start]:
            text.append(tokenizer.decode(ids[start:end]), style="green" if labelled[start] else "dim")
            start = end
    return text


def summary(rows: Any, sample: Sample | None, limit: int | None) -> list[str]:
    """Lines on all rows, and on the tokens of the first ones."""
    different, count, empty, unanswered = set(), 0, 0, 0
    for row in rows:
        different.add(hash(json.dumps(row, sort_keys=True, default=str)))
        count, empty = count + 1, empty + _has_empty_answer(row)
        unanswered += bool(row.get("messages")) and row["messages"][-1].get("role") != "assistant"
    lines = [f"{count:,} rows, {count - len(different):,} of them duplicates, {empty:,} with an empty answer."]
    if unanswered:
        lines.append(f"{unanswered:,} conversations end without an answer.")
    if sample is None or not sample.whole:
        return lines
    lengths = sorted(len(tokens.ids) for tokens in sample.whole)
    labels = sum(int(tokens.labelled.sum()) for tokens in sample.cut)
    total = sum(len(tokens.ids) for tokens in sample.cut)
    longer = sum(length > limit for length in lengths) if limit else 0
    middle, most = (lengths[math.ceil(share * len(lengths)) - 1] for share in (0.5, 0.95))
    lines.append(
        f"Tokens of the first {sample.rows:,} rows: {lengths[0]:,} to {lengths[-1]:,}, half of the sequences have "
        f"{middle:,} or fewer and 95 % {most:,} or fewer; {100 * labels / max(1, total):.0f} % are labels."
    )
    if limit:
        lines.append(f"`max_length: {limit}` cuts {longer:,} of {len(lengths):,} sequences.")
    if sample.dropped:
        lines.append(f"{sample.dropped:,} of {sample.rows:,} rows are left out: without a label, or too long.")
    return lines


def _has_empty_answer(row: Mapping[str, Any]) -> bool:
    answers = [row[name] for name in ("completion", "chosen", "rejected", "messages") if row.get(name) is not None]
    return any(_is_empty(answer) for answer in answers)


def _is_empty(answer: Any) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    last = answer[-1] if answer else {}
    return not str(last.get("content") or "").strip() and not last.get("tool_calls")
