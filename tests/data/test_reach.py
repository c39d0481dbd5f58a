"""What a chat template leaves out of a conversation."""

from __future__ import annotations

import pytest

from liger_trainer.data.turns import conversations, left_out, renderer

ASK, SAY = {"role": "user", "content": 'What is "it"?'}, {"role": "assistant", "content": "It is\nthis."}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {}}}
CALLS = [{"type": "function", "function": {"name": "search", "arguments": {}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
THOUGHTS = {**SAY, "reasoning_content": "let me think"}


def everything(turns, tools):
    return repr(tools) + "".join(
        f"<{turn['role']}>{turn.get('reasoning_content', '')}{turn['content']!r}{turn.get('tool_calls', '')}"
        for turn in turns
    )


def content_alone(turns, tools):
    return "".join(f"<{turn['role']}>{turn['content']}" for turn in turns if turn["role"] in ("user", "assistant"))


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ({"messages": [ASK, SAY]}, []),
        ({"messages": [{"role": "system", "content": "be"}, ASK, SAY]}, ["the turns of `system` (1 of 1)"]),
        ({"messages": [ASK, THOUGHTS]}, ["`reasoning_content` (1 of 1)"]),
        ({"messages": [ASK, SAY], "tools": [TOOL]}, ["`tools` (1 of 1)"]),
        ({"messages": [ASK, SAY], "tools": '[{"name": "search"}]'}, ["`tools` (1 of 1)"]),
        (
            {"messages": [ASK, CALL, {"role": "tool", "content": "3"}]},
            ["`tool_calls` (1 of 1)", "the turns of `tool` (1 of 1)"],
        ),
        ({"prompt": [ASK], "chosen": [THOUGHTS], "rejected": [SAY]}, ["`reasoning_content` (1 of 1)"]),
        ({"prompt": "text", "completion": "text"}, []),
    ],
)
def test_what_a_template_leaves_out(row, missing):
    assert left_out([row], content_alone) == missing
    assert left_out([row], everything) == []


def test_thoughts_count_where_none_of_them_reaches_the_text():
    def of_the_last(turns, tools):
        return everything([*({**turn, "reasoning_content": ""} for turn in turns[:-1]), turns[-1]], tools)

    assert left_out([{"messages": [ASK, THOUGHTS, ASK, {**SAY, "reasoning_content": "other"}]}], of_the_last) == []


def test_thoughts_inside_of_the_content_may_be_left_out():
    row = {"messages": [ASK, {"role": "assistant", "content": "<think>hm</think>It is."}]}
    assert left_out([row], lambda turns, tools: "What is it? It is.") == []


def test_conversations_of_a_row():
    assert conversations({"prompt": [ASK], "chosen": [SAY], "rejected": [CALL]}) == [[ASK, SAY], [ASK, CALL]]
    assert conversations({"prompt": [ASK]}) == [[ASK]]
    assert conversations({"prompt": "q", "completion": "a"}) == []


def test_a_processor_gets_the_parts_of_a_content():
    class Processor:
        tokenizer = None

        def apply_chat_template(self, turns, tokenize, tools, add_generation_prompt):
            return "".join(part["text"] for turn in turns for part in turn["content"])

    assert left_out([{"messages": [ASK, SAY]}], renderer(Processor(), None)) == []
