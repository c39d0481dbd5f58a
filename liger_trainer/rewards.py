"""Reward functions for GRPO and RLOO, called as TRL calls them: with prompts, completions and every data column.

Each takes completions that are text or lists of turns, and returns one number for each, or None if the data holds no
answer to compare with. A recipe names them as ``"liger_trainer.rewards:accuracy"`` and sets their keyword options with
``reward_options``; in Python, use `functools.partial`. Functions of `trl.rewards` can be named in the same way.
"""

from __future__ import annotations

import importlib.util
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
_BRACE = re.compile(r"\\boxed\{|\\?[{}]")  # escaped braces are matched so that they are skipped
_MARKED = re.compile(r"####\s*([^\n]+)")
_LONGEST_ANSWER = 200  # characters; a model may write a number that does not fit in memory


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last turn."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):  # a list of parts, as for multimodal models
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def accuracy(
    completions: Sequence[Completion],
    solution: Sequence[str] | None = None,
    answer: Sequence[str] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1 for a completion whose final answer equals that of the data, else 0.

    The final answer is in the last ``\boxed{...}``, else after the last ``####``, else the last number. Numbers are
    compared exactly, as fractions: ``1,000`` equals ``1000.0``; ``1/2``, ``\frac{1}{2}`` and ``0.5`` are equal, and so
    are ``$5`` and ``5``. If only one of the two has a percent sign, ``50%`` equals both ``0.5`` and ``50``. Other
    answers are equal if their text is, without spaces, case and ``$``, or if `trl.rewards.accuracy_reward` finds the
    formulas equal. That needs math-verify (``pip install 'liger-trainer[grpo]'``); without it, only the text counts.

    Args:
        completions: Completions to judge.
        solution: Right answers, or worked solutions that end in one; a column of the data.
        answer: The same under another name; used without `solution`.
        columns: Other columns, which are ignored.

    Returns:
        A reward for each completion; None if the data holds no answer.

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
    """1 for a completion that is thoughts between tags, once, and then an answer; else 0.

    Unlike `trl.rewards.think_format_reward`, this needs thoughts and an answer that are not empty, and accepts a prompt
    that has already opened the tag.

    Args:
        completions: Completions to judge.
        prompts: Their prompts; a prompt that ends in the opening tag has opened the thoughts.
        think_tags: Opening and closing tag of the thoughts.
        answer_tags: Opening and closing tag of the answer; with None, any text after the thoughts is the answer.
        columns: The columns of the data, which are ignored.
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
    """0 up to `free_tokens`, then falling linearly to -1 at `most_tokens` and beyond.

    The soft overlong punishment of DAPO (https://huggingface.co/papers/2503.14476, equation 13), from
    `trl.rewards.get_soft_overlong_punishment`.

    Args:
        completions: Completions to judge.
        completion_ids: Their tokens.
        free_tokens: Largest number of tokens without a penalty.
        most_tokens: Number of tokens at which the penalty reaches -1; usually ``max_completion_length``.
        columns: The columns of the data, which are ignored.

    Raises:
        ValueError: if `most_tokens` is not larger than `free_tokens`.
    """
    if most_tokens <= free_tokens:
        raise ValueError(f"`most_tokens` is {most_tokens}; it must be larger than `free_tokens`, {free_tokens}.")
    from trl.rewards import get_soft_overlong_punishment

    punishment = get_soft_overlong_punishment(most_tokens, most_tokens - free_tokens)
    rewards: list[float] = punishment(completion_ids)
    return rewards


def _judge(text: str, truth: str) -> float | None:
    expected = _marked(truth) or truth.strip()
    if not expected:
        return None
    expected_value = _value(expected)
    is_sentence = expected_value is None and _marked(truth) is None and len(expected.split()) > 3
    if is_sentence:  # which contains the answer
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
        return float(_plain(given) == _plain(expected) or _same_formula(given, expected))
    if given_value == expected_value:
        return 1.0
    percents = [text.rstrip(" .}$").endswith("%") for text in (given, expected)]
    hundredfold = given_value == expected_value * 100 or given_value * 100 == expected_value
    return float(percents[0] != percents[1] and hundredfold)


def _same_formula(given: str, expected: str) -> bool:
    """Whether math-verify finds two formulas equal; False if it is not installed."""
    if importlib.util.find_spec("math_verify") is None or max(len(given), len(expected)) > _LONGEST_ANSWER:
        return False
    from trl.rewards import accuracy_reward

    completion = [{"role": "assistant", "content": rf"\boxed{{{given}}}"}]
    return accuracy_reward([completion], [rf"\boxed{{{expected}}}"]) == [1.0]


def _marked(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, else the text after the last ``####``, else None."""
    opened: list[tuple[int, bool]] = []  # start of each open brace, and whether it is a box
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
    """`text` as a number, without a percent sign; None if it is not a number."""
    if len(text) > _LONGEST_ANSWER:
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
    """`text` in lower case, without spaces, dollar signs (of money and of formulas) and a full stop at its end."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,!;: ]|\\left(?![a-z])|\\right(?![a-z])|\\?\$|\s", "", text.replace("{,}", ","))
    return text.rstrip(".").casefold()
