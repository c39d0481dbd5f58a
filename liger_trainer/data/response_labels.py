"""Which tokens of a conversation the assistant writes, for any chat template.

A template may mark them itself with `{% generation %}`. Where it does not, this compares what it writes with what it
writes of the same conversation with another answer. What differs is the answer, with its thoughts and tool calls. The
token that ends it counts too, and so does what stands between the generation prompt and the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from liger_trainer.data.turns import Turn, is_learnt

_OTHER = "\ue000other\ue001"
"""An answer that shares neither its first nor its last character with any other: both are for private use."""

Turns = Sequence[Turn]
Render = Callable[..., str]
"""Writes a conversation: called with its turns, and with `add_generation_prompt`."""


class Span(NamedTuple):
    """Where an answer is in a text: its first character, and the one after its last."""

    start: int
    end: int


def answer_spans(turns: Turns, render: Render, special: Sequence[str]) -> list[Span]:
    """Where the assistant's turns are in what `render` writes of `turns`.

    Args:
        turns: The conversation.
        render: Writes turns as the chat template does.
        special: The special tokens of the tokenizer, none of which is cut in two.

    Returns:
        A span for each turn of the assistant that reaches the text and is to be learnt.
    """
    text, header = render(turns), _header(render)
    spans: list[Span] = []
    last = 0
    for place, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        asked, after = turns[:place], turns[place + 1 :]
        find = _calls if "tool_calls" in turn else _words
        found = find(text, asked, turn, after, render, special)
        if found is None:
            continue
        before = text.rfind(header, last, found.start) if header else -1
        last = found.end
        if is_learnt(turn):
            spans.append(found if before < 0 else Span(before + len(header), found.end))
    return spans


def _words(text: str, asked: Turns, turn: Turn, after: Turns, render: Render, special: Sequence[str]) -> Span | None:
    """Where an answer without tool calls is: what changes with it, and what closes it."""
    other: Turn = {"role": turn["role"], "content": _OTHER}
    found = _changed(text, render([*asked, other, *after]))
    if found is None:
        return None
    closing = _common(render([*asked, other]).rpartition(_OTHER)[2], text[found.end :])
    return Span(found.start, _between_tokens(text, found.end, closing, special))


def _calls(text: str, asked: Turns, turn: Turn, after: Turns, render: Render, special: Sequence[str]) -> Span | None:
    """Where an answer with tool calls is: what the conversation up to it adds to its prompt.

    A template may write the answers of the tools before the content of the turn that calls them, or no content at all;
    it may leave out the thoughts of a turn that is not the last.
    """
    if not text.startswith(render(asked)):  # such as where the tools stand before the last question
        return _calls_in_place(text, asked, turn, after, render, special)
    start = len(_common(text, render(asked, add_generation_prompt=True)))
    without_thoughts = {key: value for key, value in turn.items() if key in ("role", "content", "tool_calls")}
    written = [_common(text, render([*asked, each])) for each in (turn, without_thoughts)]
    longest = max(written, key=len)
    return Span(min(start, len(longest)), _between_tokens(text, start, longest[start:], special))


def _calls_in_place(
    text: str, asked: Turns, turn: Turn, after: Turns, render: Render, special: Sequence[str]
) -> Span | None:
    """Where an answer with tool calls is: what changes with it, up to the next special token."""
    call = {"type": "function", "id": _OTHER, "function": {"name": _OTHER, "arguments": {_OTHER: _OTHER}}}
    found = [
        _changed(text, render([*asked, {"role": turn["role"], "content": _OTHER, **calls}, *after]))
        for calls in ({"tool_calls": [call] * len(turn["tool_calls"])}, {})
    ]
    starts, ends = [span.start for span in found if span], [span.end for span in found if span]
    if not starts:
        return None
    closing = [(text.find(token, max(ends)), token) for token in special]
    place, token = min(((place, token) for place, token in closing if place >= 0), default=(max(ends), ""))
    return Span(min(starts), place + len(token))


def _changed(text: str, other: str) -> Span | None:
    """The part of `text` that is not in `other`; None if they are the same."""
    if text == other:
        return None
    first = len(_common(text, other))
    after = len(_common(text[first:][::-1], other[first:][::-1]))
    return Span(first, len(text) - after)


def _between_tokens(text: str, last: int, closing: str, special: Sequence[str]) -> int:
    """Where the answer that is written up to `last` ends, with the special tokens that close it.

    Args:
        text: The whole conversation.
        last: The end of the answer's own words.
        closing: The text after them, as far as it is the same where the conversation ends there; its end may cut a
            special token, where an answer in the middle is closed by another token than the last one.
        special: The special tokens.
    """
    end = last + len(closing)
    for token in special:
        place = text.find(token, max(last, end - len(token) + 1), end + len(token) - 1)
        if last <= place < end < place + len(token):
            closed = any(other in closing[: place - last] for other in special)
            end = place if closed else place + len(token)
            break
    return max(last, len(text[:end].rstrip()))


def answer_mask(turns: Turns, tokenizer: Any, **options: Any) -> dict[str, list[int]]:
    """The tokens of a conversation, and which of them the assistant writes.

    Args:
        turns: The conversation.
        tokenizer: A fast tokenizer with a chat template.
        options: More arguments of `apply_chat_template`, such as `tools` and `chat_template`.

    Returns:
        `input_ids` and `assistant_masks`, as `apply_chat_template` names them.
    """

    def render(turns: Turns, add_generation_prompt: bool = False) -> str:
        settings = {**options, "add_generation_prompt": add_generation_prompt}
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, **settings))

    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    spans = answer_spans(turns, render, special)
    encoded = tokenizer(render(turns), add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        int(any(first < span.end and last > span.start for span in spans)) for first, last in encoded["offset_mapping"]
    ]
    return {"input_ids": encoded["input_ids"], "assistant_masks": mask}


def _common(text: str, other: str) -> str:
    """The longest beginning of both texts."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text.startswith(other[:middle]) else (least, middle - 1)
    return text[:least]


def _header(render: Render) -> str:
    """What a template writes before an answer, and at the end of a prompt."""
    question: Turn = {"role": "user", "content": "?"}
    asked, prompt = render([question]), render([question], add_generation_prompt=True)
    answered = render([question, {"role": "assistant", "content": _OTHER}]).partition(_OTHER)[0]
    common = _common(prompt, answered)
    return common[len(asked) :] if common.startswith(asked) else ""
