"""Reward functions for GRPO and RLOO, called as TRL calls them: with prompts, completions and every data column.

Each takes plain completions (text) and conversational ones (a list of turns), and returns one number a completion, or
None where there is nothing to judge by. In a recipe they are named ``"liger_trainer.rewards:accuracy"``; their keyword
options are set there with ``reward_options``, and in Python with `functools.partial`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Completion = str | list[dict[str, Any]]

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_TEX_FRACTION = r"\\[dt]?frac\s*(?:\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}|\d\s*\d)"
# A number in running text. A minus sign after a word or a bracket is a subtraction or a dash.
_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])[-\u2212])?\\?\$?(?:{_TEX_FRACTION}|(?:{_DIGITS})(?:/\d+)?)(?:\\?%)?")
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?:(?P<top>{_DIGITS})(?:/(?P<bottom>\d+))?)(?:e(?P<exponent>[-+]?\d{{1,3}}))?")
_BRACE = re.compile(r"\\boxed\{|\\?[{}]")  # an escaped one is matched to be passed over
_MARKED = re.compile(r"####\s*([^\n]+)")
_LONGEST_NUMBER = 200  # characters; what a model writes is not to be trusted with the machine's memory


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last turn."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):  # content in parts, as multimodal models have it
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def accuracy(
    completions: Sequence[Completion],
    solution: Sequence[str] | None = None,
    answer: Sequence[str] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1 where the final answer of a completion is that of the data, else 0.

    The final answer is what stands in the last ``\boxed{...}``, else after the last ``####``, else the last number.
    Numbers are compared exactly, as fractions: ``1,000`` and ``1000.0``, ``1/2``, ``\frac{1}{2}`` and ``0.5``, ``$5``
    and ``5`` are equal. Where only one of the two has a percent sign, ``50%`` is equal to ``0.5`` and to ``50``.
    What is not a number is compared as text without spaces, case and ``$``.

    Args:
        completions: Completions to judge.
        solution: Right answers, or worked solutions that end in one; a column of the data.
        answer: The same under another name; used where there is no `solution`.
        columns: The other columns, which are not used.

    Returns:
        A reward for each completion; None where the data holds no answer.

    Raises:
        ValueError: if the data has neither column.
    """
    truths = solution if solution is not None else answer
    if truths is None:
        raise ValueError(
            "`accuracy` needs the data to have a column `solution` or `answer` with the right answers; "
            '`columns: {"solution": ...}` in a recipe renames one.'
        )
    return [_judge(completion_text(text), str(truth or "")) for text, truth in zip(completions, truths, strict=True)]


def format(
    completions: Sequence[Completion],
    prompts: Sequence[Completion] | None = None,
    *,
    think_tags: tuple[str, str] = ("<think>", "</think>"),
    answer_tags: tuple[str, str] | None = None,
    **columns: Any,
) -> list[float]:
    """1 where a completion is thoughts between tags, once, and then an answer; else 0.

    Args:
        completions: Completions to judge.
        prompts: Their prompts; one that ends in the opening tag has opened the thoughts already.
        think_tags: What opens and closes the thoughts.
        answer_tags: What opens and closes the answer; None takes any text after the thoughts.
        columns: The columns of the data, which are not used.
    """
    opening, closing = think_tags
    tags = [opening, closing, *(answer_tags or ())]
    answer = r"\S.*" if answer_tags is None else rf"{re.escape(answer_tags[0])}\s*\S.*{re.escape(answer_tags[1])}\s*"
    pattern = re.compile(rf"\s*{re.escape(opening)}\s*\S.*{re.escape(closing)}\s*{answer}", re.DOTALL)
    rewards = []
    for number, completion in enumerate(completions):
        text = completion_text(completion)
        if prompts is not None and completion_text(prompts[number]).rstrip().endswith(opening):
            text = opening + text
        once = all(text.count(tag) == 1 for tag in tags)
        rewards.append(1.0 if once and pattern.fullmatch(text) else 0.0)
    return rewards


def length(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    free_tokens: int = 768,
    most_tokens: int = 1024,
    **columns: Any,
) -> list[float]:
    """0 for a completion of up to `free_tokens`, falling in a line to -1 at `most_tokens` and beyond.

    The soft overlong punishment of DAPO (https://huggingface.co/papers/2503.14476, equation 13).

    Args:
        completions: Completions to judge.
        completion_ids: Their tokens, which are counted.
        free_tokens: Tokens that cost nothing.
        most_tokens: Tokens from which on the penalty is whole; usually ``max_completion_length``.
        columns: The columns of the data, which are not used.

    Raises:
        ValueError: if `most_tokens` is not larger than `free_tokens`.
    """
    if most_tokens <= free_tokens:
        raise ValueError(f"`most_tokens` is {most_tokens}; it must be larger than `free_tokens`, {free_tokens}.")
    return [-min(max((len(ids) - free_tokens) / (most_tokens - free_tokens), 0.0), 1.0) for ids in completion_ids]


def _judge(text: str, truth: str) -> float | None:
    expected = _marked(truth) or truth.strip()
    if not expected:
        return None
    expected_value = _value(expected)
    if expected_value is None and _marked(truth) is None and len(expected.split()) > 3:  # a sentence, not an answer
        numbers = _IN_TEXT.findall(expected)
        expected = numbers[-1] if numbers else expected
        expected_value = _value(expected)
    given = _marked(text)
    if given is None:
        numbers = _IN_TEXT.findall(text) if expected_value is not None else text.strip().splitlines()[-1:]
        if not numbers:
            return 0.0
        given = numbers[-1]
    given_value = _value(given)
    if expected_value is None or given_value is None:
        return float(_plain(given) == _plain(expected))
    if given_value == expected_value:
        return 1.0
    percents = [text.rstrip(" .}$").endswith("%") for text in (given, expected)]
    hundredfold = given_value == expected_value * 100 or given_value * 100 == expected_value
    return float(percents[0] != percents[1] and hundredfold)


def _marked(text: str) -> str | None:
    r"""What the last whole ``\boxed{...}`` holds, else what follows the last ``####``, else None."""
    opened: list[tuple[int, bool]] = []  # where each brace that is open now starts, and whether it is a box's
    box: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] in ("{", "\\boxed{"):
            opened.append((brace.end(), brace[0] != "{"))
        elif brace[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and (box is None or start > box[0]):
                box = start, brace.start()
    if box is not None:
        return text[box[0] : box[1]].strip() or None
    found = _MARKED.findall(text)
    return found[-1].strip() or None if found else None


def _value(text: str) -> Fraction | None:
    """The number `text` is, with a percent sign left out; None where it is something else."""
    if len(text) > _LONGEST_NUMBER:
        return None
    text = _plain(text).replace("\u2212", "-").replace("\\%", "").rstrip("%")
    text = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)
    text = re.sub(r"\\[dt]?frac(\d)(\d)", r"\1/\2", text)
    text = re.sub(r"(?:\\times|\\cdot)10\^\{?([-+]?\d{1,3})\}?", r"e\1", text)
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    bottom = int(found["bottom"] or 1)
    if bottom == 0:
        return None
    value = Fraction(found["top"].replace(",", "")) / bottom * Fraction(10) ** int(found["exponent"] or 0)
    return -value if found["sign"] == "-" else value


def _plain(text: str) -> str:
    """`text` without case, spaces, dollar signs (of money and of formulas) and a full stop at its end."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,!;: ]|\\left(?![a-z])|\\right(?![a-z])|\\?\$|\s", "", text.replace("{,}", ","))
    return text.rstrip(".").casefold()
