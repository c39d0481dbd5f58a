"""Rows of every shape that users bring, and the rows that the trainers take."""

from __future__ import annotations

import json

import pytest

from liger_trainer.data.shapes import (
    ALPACA,
    ALPACA_WITH_INPUT,
    ShapeError,
    in_words,
    names_in,
    recognised,
    with_system_prompt,
)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


SYSTEM, ASK, SAY = turn("system", "be"), turn("user", "q"), turn("assistant", "a")
GOOD, BAD = [turn("assistant", "good")], [turn("assistant", "bad")]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = turn("assistant", "", tool_calls=[CALL])


def shape_of(kind, row, roles=None, prompt_template=None, has_template=True, text="text"):
    return recognised(kind, list(row), [row], roles or {}, prompt_template, text, lambda: has_template)


TALKS = {
    "ShareGPT": ({"conversations": SHAREGPT}, [ASK, SAY]),
    "ShareGPT with a system turn": (
        {"conversations": [{"from": "system", "value": "be"}, *SHAREGPT], "id": "7"},
        [SYSTEM, ASK, SAY],
    ),
    "ShareGPT with a system column": ({"conversations": SHAREGPT, "system": "be"}, [SYSTEM, ASK, SAY]),
    "an empty system column": ({"conversations": SHAREGPT, "system": ""}, [ASK, SAY]),
    "a system column and a system turn": ({"messages": [SYSTEM, ASK, SAY], "system": "other"}, [SYSTEM, ASK, SAY]),
    "ShareGPT as text of JSON": ({"conversations": json.dumps(SHAREGPT)}, [ASK, SAY]),
    "conversations of role and content": ({"conversations": [ASK, SAY]}, [ASK, SAY]),
    "conversation": ({"conversation": [ASK, SAY]}, [ASK, SAY]),
    "messages as text of JSON": ({"messages": json.dumps([ASK, SAY])}, [ASK, SAY]),
    "messages of from and value": ({"messages": SHAREGPT}, [ASK, SAY]),
    "bot": ({"dialogue": [{"from": "user", "value": "q"}, {"from": "bot", "value": "a"}]}, [ASK, SAY]),
    "roles in capitals": ({"messages": [turn("User", "q"), turn("Assistant", "a")]}, [ASK, SAY]),
    "speaker and text": ({"chat": [{"speaker": "human", "text": "q"}, {"speaker": "ai", "text": "a"}]}, [ASK, SAY]),
    "a tool call of ShareGPT": (
        {
            "conversations": [
                SHAREGPT[0],
                {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
                {"from": "observation", "value": "3"},
                SHAREGPT[1],
            ],
            "tools": "[]",
        },
        [ASK, CALLED, turn("tool", "3"), SAY],
    ),
    "parts of text": (
        {"messages": [turn("user", [{"type": "text", "text": "q"}]), turn("assistant", [{"text": "a", "type": None}])]},
        [ASK, SAY],
    ),
    "several parts of text": (
        {"conversations": [turn("human", [{"type": "text", "text": text} for text in ("q", "\nx")]), SAY]},
        [turn("user", "q\nx"), SAY],
    ),
    "keys that Arrow has added": (
        {"messages": [{**ASK, "tool_calls": None}, {**CALLED, "name": None}, turn("tool", "3"), SAY]},
        [ASK, CALLED, turn("tool", "3"), SAY],
    ),
    "OpenAI's older calls": (
        {
            "messages": [
                ASK,
                turn("assistant", None, function_call={"name": "f", "arguments": '{"x": 1}'}),
                turn("function", "3"),
                SAY,
            ]
        },
        [ASK, CALLED, turn("tool", "3"), SAY],
    ),
    "calls whose arguments are parameters": (
        {
            "messages": [
                ASK,
                {"from": "function_call", "value": json.dumps({"name": "f", "parameters": {"x": 1}})},
                turn("assistant", None, function_call={"name": "f", "parameters": {"x": 1}}),
                turn("assistant", None, tool_calls=[{**CALL, "function": {"name": "f", "parameters": '{"x": 1}'}}]),
            ]
        },
        [ASK, CALLED, CALLED, CALLED],
    ),
    "a call of a name alone": (
        {"messages": [ASK, turn("function_call", '{"name": "f"}')]},
        [
            ASK,
            turn("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
        ],
    ),
    "arguments that Arrow has added": (
        {
            "messages": [
                ASK,
                turn(
                    "assistant",
                    None,
                    tool_calls=[{**CALL, "function": {"name": "f", "arguments": {"x": 1, "y": None}}}],
                ),
                turn("tool", "3"),
            ]
        },
        [ASK, CALLED, turn("tool", "3")],
    ),
    "thoughts": ({"messages": [ASK, {**SAY, "reasoning_content": "hm"}]}, [ASK, {**SAY, "reasoning_content": "hm"}]),
}

PAIRS_OF_TEXT = {
    "Alpaca": ({"instruction": "q", "input": "", "output": "a"}, [ASK]),
    "Alpaca with input": ({"instruction": "q", "input": "x", "output": "a"}, [turn("user", "q\nx")]),
    "Alpaca without input": ({"instruction": "q", "output": "a"}, [ASK]),
    "Alpaca with a null input": ({"instruction": "q", "input": None, "output": "a"}, [ASK]),
    "Alpaca with a system column": ({"instruction": "q", "output": "a", "system": "be"}, [SYSTEM, ASK]),
    "Alpaca with history": (
        {"instruction": "q", "output": "a", "history": [["one", "two"], ["three", "four"]]},
        [turn("user", "one"), turn("assistant", "two"), turn("user", "three"), turn("assistant", "four"), ASK],
    ),
    "Dolly": ({"instruction": "q", "context": "x", "response": "a", "category": "c"}, [turn("user", "q\nx")]),
    "question and answer": ({"question": "q", "answer": "a"}, [ASK]),
    "names in capitals": ({"Question": "q", "Answer": "a"}, [ASK]),
    "query and response": ({"query": "q", "response": "a"}, [ASK]),
    "problem and solution": ({"problem": "q", "solution": "a"}, [ASK]),
    "input and output": ({"input": "q", "output": "a"}, [ASK]),
    "prompt and response": ({"prompt": "q", "response": "a"}, [ASK]),
    "prompt and completion with a system column": ({"prompt": "q", "completion": "a", "system": "be"}, [SYSTEM, ASK]),
}

PREFERENCES = {
    "Orca": ({"system": "be", "question": "q", "chosen": "good", "rejected": "bad"}, [SYSTEM, ASK]),
    "instruction and input": (
        {"instruction": "q", "input": "x", "chosen": "good", "rejected": "bad"},
        [turn("user", "q\nx")],
    ),
    "a conversation, and turns": (
        {
            "conversations": SHAREGPT[:1],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        [ASK],
    ),
    "a conversation, and text": ({"messages": [SYSTEM, ASK], "chosen": "good", "rejected": "bad"}, [SYSTEM, ASK]),
    "a prompt of text, and turns": ({"prompt": "q", "chosen": GOOD, "rejected": BAD}, [ASK]),
    "a prompt of turns, and text": ({"prompt": [ASK], "chosen": "good", "rejected": "bad"}, [ASK]),
    "other names": ({"question": "q", "chosen_response": "good", "rejected_response": "bad"}, [ASK]),
    "preferred and dispreferred": ({"prompt": "q", "preferred": "good", "dispreferred": "bad"}, [ASK]),
}


@pytest.mark.parametrize("name", TALKS)
def test_conversations(name):
    row, turns = TALKS[name]
    assert shape_of("messages", row)(row) == {"messages": turns}


@pytest.mark.parametrize("name", PAIRS_OF_TEXT)
def test_questions_and_answers(name):
    row, prompt = PAIRS_OF_TEXT[name]
    assert shape_of("messages", row)(row) == {"prompt": prompt, "completion": [SAY]}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(name):
    row, prompt = PREFERENCES[name]
    assert shape_of("preference", row)(row) == {"prompt": prompt, "chosen": GOOD, "rejected": BAD}


@pytest.mark.parametrize("kind", ["preference", "prompt"])
def test_parts_of_text_are_joined_in_every_column(kind):
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]
    row = {"prompt": [turn("user", parts)]}
    row |= {"chosen": [turn("assistant", parts)], "rejected": BAD} if kind == "preference" else {}
    made = shape_of(kind, row)(row)
    assert {name: turns[0]["content"] for name, turns in made.items()} == {
        name: "bad" if name == "rejected" else "q!" for name in row
    }


def test_parts_stay_where_there_are_pictures():
    talk = [turn("user", [{"type": "image"}, {"type": "text", "text": "q"}]), SAY]
    assert shape_of("messages", {"messages": talk, "images": ["a.png"]}) is None
    row = {"conversations": talk, "image": "a.png"}
    assert shape_of("messages", row)(row) == {"messages": talk}
    own = {"prompt": [turn("user", [{"type": "image", "image": "a.png"}])]}
    assert shape_of("prompt", own) is None


def test_answers_that_begin_with_their_prompt():
    row = {"prompt": "q", "prompt_id": "7", "chosen": [ASK, *GOOD], "rejected": [ASK, *BAD], "score_chosen": 9.0}
    shape = shape_of("preference", row)
    assert shape(row) == {"chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]}
    line = in_words(shape, list(row), [row])
    assert line == "Data: `chosen`, `rejected` → `chosen`, `rejected`; not used: `prompt`, `prompt_id`, `score_chosen`."
    with pytest.raises(ShapeError, match="the answers begin with their prompt; leave it out"):
        shape_of("preference", row, prompt_template="{prompt}!")(row)


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"messages": [ASK, SAY], "label": True}, {"prompt": [ASK], "completion": [SAY], "label": True}),
        ({"conversations": SHAREGPT, "kto_tag": False}, {"prompt": [ASK], "completion": [SAY], "label": False}),
        ({"messages": [ASK, SAY], "label": 0.0}, {"prompt": [ASK], "completion": [SAY], "label": False}),
        ({"question": "q", "answer": "a", "label": "bad"}, {"prompt": [ASK], "completion": [SAY], "label": False}),
        ({"instruction": "q", "output": "a", "kto_tag": 1}, {"prompt": [ASK], "completion": [SAY], "label": True}),
        ({"question": "q", "chosen": "good", "rejected": "bad"}, {"prompt": [ASK], "chosen": GOOD, "rejected": BAD}),
    ],
)
def test_labelled_answers(row, made):
    assert shape_of("unpaired", row)(row) == made


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "q", "answer": "42"}, [ASK]),
        ({"problem": "q", "solution": "42", "system": "be"}, [SYSTEM, ASK]),
        ({"instruction": "q", "input": "x"}, [turn("user", "q\nx")]),
        ({"messages": [SYSTEM, ASK, SAY], "answer": "42"}, [SYSTEM, ASK]),
        ({"conversations": SHAREGPT}, [ASK]),
    ],
)
def test_prompts(row, prompt):
    assert shape_of("prompt", row)(row) == {"prompt": prompt}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("messages", {"messages": [ASK, SAY]}),
        ("messages", {"prompt": "q", "completion": "a"}),
        ("messages", {"prompt": [ASK], "completion": [SAY], "tools": "[]"}),
        ("messages", {"text": "q"}),
        ("messages", {"text": "below is", "instruction": "q", "output": "a"}),
        ("messages", {"input_ids": [1, 2]}),
        ("messages", {"sentence": "q", "sentiment": 1}),
        ("preference", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        ("preference", {"prompt": [ASK], "chosen": GOOD, "rejected": BAD}),
        ("preference", {"chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]}),
        ("preference", {"chosen": "q good", "rejected": "q bad"}),
        ("unpaired", {"prompt": "q", "completion": "a", "label": True}),
        ("unpaired", {"prompt": [ASK], "completion": [SAY], "label": 0}),
        ("prompt", {"prompt": "q", "answer": "42"}),
        ("prompt", {"prompt": [ASK]}),
        ("text", {"text": "q"}),
    ],
)
def test_rows_that_are_taken_as_they_are(kind, row):
    assert shape_of(kind, row) is None


def test_without_a_chat_template_a_question_is_asked_in_the_words_of_alpaca():
    row = {"instruction": "q", "input": "x", "output": "a"}
    shape = shape_of("messages", row, has_template=False)
    assert shape(row) == {"prompt": ALPACA_WITH_INPUT.format(instruction="q", input="x"), "completion": "a"}
    assert shape({**row, "input": ""}) == {"prompt": ALPACA.format(instruction="q"), "completion": "a"}
    assert "there is no chat template" in in_words(shape, list(row), [row])


def test_a_prompt_template_is_plain_text():
    row = {"question": "q", "hint": None, "answer": "a"}
    shape = shape_of("messages", row, prompt_template="Q: {question} ({hint})\nA: {{}}")
    assert shape(row) == {"prompt": "Q: q ()\nA: {}", "completion": "a"}
    assert "as plain text with `prompt_template`" in in_words(shape, list(row), [row])


def test_a_prompt_template_and_other_roles_take_the_place_of_what_is_recognised():
    row = {"prompt": "q", "completion": "a"}
    assert shape_of("messages", row, prompt_template="{prompt}!")(row)["prompt"] == "q!"
    talk = {"messages": [turn("narrator", "be"), ASK, SAY]}
    assert shape_of("messages", talk, roles={"narrator": "system"})(talk) == {"messages": [SYSTEM, ASK, SAY]}


@pytest.mark.parametrize("template", ["{question", "{}"])
def test_prompt_templates_that_cannot_be_read(template):
    with pytest.raises(ShapeError, match="`prompt_template` is "):
        names_in(template)


@pytest.mark.parametrize(
    ("kind", "row", "words"),
    [
        ("messages", {"messages": [turn("narrator", "q"), SAY]}, "a turn of 'narrator', which names none of the roles"),
        ("messages", {"conversations": [{"from": "human"}, SAY]}, "a turn without `content`"),
        ("messages", {"conversations": [{"role": "user", "content": 7}]}, "a turn whose `content` is int"),
        (
            "messages",
            {"conversations": [*SHAREGPT, {"from": "function_call", "value": "f(x)"}]},
            "not JSON with `name`",
        ),
        ("messages", {"conversations": [*SHAREGPT, "text"]}, "a list with str"),
        ("messages", {"conversations": [turn("user", ["a", "b"]), SAY]}, "`content` is a list of other things than"),
        ("messages", {"messages": [turn("user", [{"type": "refusal"}]), SAY]}, "'refusal', which the model would not"),
        ("messages", {"messages": [ASK, SAY], "system": ["s"]}, "`system` holds list, not text"),
        ("prompt", {"prompt": [turn("user", [{"type": "image_url", "image_url": "a"}])]}, "'image_url', which"),
        ("messages", {"question": 7, "answer": "a"}, "`question` holds int, not text"),
        ("messages", {"question": "q", "answer": 7}, "`answer` holds int, not text or turns"),
        ("unpaired", {"question": "q", "answer": "a", "label": "maybe"}, "`label` holds 'maybe'; it must hold true or"),
        ("unpaired", {"messages": [ASK], "label": True}, "ends with a turn of 'user'"),
        ("prompt", {"messages": [SAY]}, "its conversation is an answer alone"),
    ],
)
def test_rows_that_cannot_be_read(kind, row, words):
    with pytest.raises(ShapeError, match=words):
        shape_of(kind, row)(row)


def test_words_name_the_columns_the_roles_and_what_is_not_used():
    row = {"conversations": SHAREGPT, "system": "be", "id": 7, "tools": "[]"}
    line = in_words(shape_of("messages", row), list(row), [row], kept=["tools"])
    assert line == "Data: `conversations`, `system` → `messages` (human → user, gpt → assistant); not used: `id`."


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ({"prompt": "q"}, {"prompt": [SYSTEM, ASK]}),
        ({"prompt": "q", "completion": "a"}, {"prompt": [SYSTEM, ASK], "completion": [SAY]}),
        ({"prompt": [ASK], "chosen": GOOD, "rejected": BAD}, {"prompt": [SYSTEM, ASK]}),
        ({"messages": [ASK, SAY]}, {"messages": [SYSTEM, ASK, SAY]}),
        ({"messages": [turn("system", "own"), ASK]}, {"messages": [turn("system", "own"), ASK]}),
        (
            {"chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]},
            {"chosen": [SYSTEM, ASK, *GOOD], "rejected": [SYSTEM, ASK, *BAD]},
        ),
    ],
)
def test_a_system_prompt(row, changed):
    assert with_system_prompt(row, "be", ("completion", "chosen", "rejected")) == changed


def test_an_empty_system_prompt_makes_turns_alone():
    assert with_system_prompt({"prompt": "q", "completion": "a"}, "", ()) == {"prompt": [ASK]}


@pytest.mark.parametrize("kind", ["preference", "unpaired"])
def test_cells_of_json_are_the_turns_that_they_hold(kind):
    cells = {"prompt": "q", "chosen": json.dumps([ASK, *GOOD]), "rejected": json.dumps([ASK, *BAD])}
    assert shape_of(kind, cells)(cells) == {"chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]}
    cells = {"prompt": json.dumps(SHAREGPT[:1]), "chosen": json.dumps(GOOD), "rejected": "bad"}
    shape = shape_of(kind, cells)
    assert shape(cells) == {"prompt": [ASK], "chosen": GOOD, "rejected": BAD}
    assert "(human → user)" in in_words(shape, list(cells), [cells])


def test_cells_of_json_are_the_turn_that_they_hold():
    cells = {name: json.dumps({"from": who, "value": said}) for name, who, said in ONE_TURN}
    assert shape_of("preference", cells)(cells) == {"prompt": [ASK], "chosen": GOOD, "rejected": BAD}
    beside = {"conversations": json.dumps(SHAREGPT[:1]), **cells}
    assert shape_of("preference", beside)(beside) == {"prompt": [ASK], "chosen": GOOD, "rejected": BAD}


ONE_TURN = (("prompt", "human", "q"), ("chosen", "gpt", "good"), ("rejected", "gpt", "bad"))


@pytest.mark.parametrize("written", [[ASK, SAY], [SAY, ASK], ASK])
def test_an_answer_that_holds_a_question_stays_text(written):
    row = {"prompt": "Write a chat.", "completion": json.dumps(written)}
    assert shape_of("messages", row) is None
    row = {"question": "Write.", "chosen": json.dumps([SAY, ASK]), "rejected": json.dumps(ASK)}
    made = shape_of("preference", row)(row)
    assert [made[name][0]["content"] for name in ("chosen", "rejected")] == [row["chosen"], row["rejected"]]


def test_cells_of_json_in_questions_and_answers():
    cells = {"prompt": json.dumps([SYSTEM, ASK]), "completion": json.dumps([SAY])}
    assert shape_of("messages", cells)(cells) == {"prompt": [SYSTEM, ASK], "completion": [SAY]}
    written = {"instruction": "q", "output": json.dumps([ASK, SAY])}  # a dialogue is what was asked for
    assert shape_of("messages", written)(written)["completion"] == [turn("assistant", written["output"])]
    one = {"prompt": ASK, "completion": SAY}
    assert shape_of("messages", one)(one) == {"prompt": [ASK], "completion": [SAY]}


def test_lists_of_json_that_are_no_turns_stay_text():
    books = json.dumps([{"author": "Tolkien", "title": "The Hobbit"}])
    row = {"prompt": "q", "chosen": books, "rejected": "bad"}
    assert shape_of("preference", row) is None
    row = {"prompt": "q", "completion": books, "system": ""}
    assert shape_of("messages", row)(row) == {"prompt": [ASK], "completion": [turn("assistant", books)]}


def test_text_that_happens_to_be_json_stays_text():
    row = {"instruction": "Extract", "output": '{"role": "user", "text": "A"}', "input": '[{"speaker": "agent"}]'}
    made = shape_of("messages", row)(row)
    assert made["prompt"] == [turn("user", 'Extract\n[{"speaker": "agent"}]')]
    assert made["completion"] == [turn("assistant", row["output"])]


@pytest.mark.parametrize(
    ("history", "turns"),
    [
        ([ASK, SAY], [ASK, SAY]),
        (json.dumps([["q", "a"]]), [ASK, SAY]),
        ([], []),
        (None, []),
    ],
)
def test_histories(history, turns):
    row = {"instruction": "more", "output": "a", "history": history}
    assert shape_of("messages", row)(row)["prompt"] == [*turns, turn("user", "more")]


@pytest.mark.parametrize("history", [["q", "a"], "User: x", [["q"]]])
def test_histories_that_cannot_be_read(history):
    row = {"instruction": "more", "output": "a", "history": history}
    with pytest.raises(ShapeError, match=r"`history` holds .*; it must hold pairs of a question and its answer"):
        shape_of("messages", row)(row)


def test_a_history_without_a_chat_template_is_said_to_be_unused():
    row = {"instruction": "q", "output": "a", "history": [["q", "a"]]}
    assert "not used: `history`" in in_words(shape_of("messages", row, has_template=False), list(row), [row])


def test_a_prompt_stays_where_answers_of_several_turns_do_not_begin_with_it():
    rest = [turn("assistant", "hm"), turn("user", "go"), turn("assistant", "yes")]
    row = {"prompt": "q", "chosen": rest, "rejected": rest[:1]}
    assert shape_of("preference", row)(row) == {"prompt": [ASK], "chosen": rest, "rejected": rest[:1]}


def test_arguments_of_tools_as_json_become_a_mapping():
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    row = {"messages": [ASK, turn("assistant", "", tool_calls=calls), turn("tool", "3"), SAY]}
    assert shape_of("messages", row)(row)["messages"][1] == CALLED


def test_arguments_by_an_unknown_name_are_refused():
    row = {"messages": [ASK, turn("function_call", '{"name": "f", "input": {"x": 1}}')]}
    with pytest.raises(ShapeError, match="a function call without `arguments`"):
        shape_of("messages", row)(row)


def test_a_prompt_beside_a_conversation_is_not_used():
    row = {"prompt": "q", "prompt_id": "1", "messages": [ASK, SAY]}
    assert shape_of("messages", row)(row) == {"messages": [ASK, SAY]}


def test_a_context_beside_an_input_is_used():
    row = {"input": "q", "context": "x", "output": "a"}
    assert shape_of("messages", row)(row)["prompt"] == [turn("user", "q\nx")]


def test_labels_in_words_change_no_other_column():
    row = {"prompt": "q", "completion": "a", "label": "good"}
    assert shape_of("unpaired", row)(row) == {"prompt": "q", "completion": "a", "label": True}


def test_later_rows_that_are_no_conversations():
    row = {"messages": json.dumps([ASK, SAY])}
    shape = shape_of("messages", row)
    for text in ("hello", '[{"role": "user", "content": "tru', "[{'role': 'user'}]"):
        with pytest.raises(ShapeError, match="not a list of turns"):
            shape({"messages": text})


@pytest.mark.parametrize("template", ["", "{question:d}", "{question!r}"])
def test_prompt_templates_of_more_than_names(template):
    with pytest.raises(ShapeError, match="write text, with names of columns alone in the braces"):
        names_in(template)


def test_a_prompt_template_beside_a_conversation_is_refused():
    with pytest.raises(ShapeError, match="`messages` holds conversations; leave it out"):
        shape_of("messages", {"messages": [ASK, SAY], "topic": "t"}, prompt_template="{topic}")


def test_roles_that_change_places_are_read_once():
    row = {"messages": [turn("assistant", "q"), turn("user", "a")]}
    roles = {"user": "assistant", "assistant": "user"}
    assert shape_of("messages", row, roles=roles)(row) == {"messages": [ASK, SAY]}
    pair = {
        "chosen": [*row["messages"][:1], turn("user", "good")],
        "rejected": [*row["messages"][:1], turn("user", "bad")],
    }
    made = shape_of("preference", pair, roles=roles)(pair)
    assert made == {"chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]}


def test_a_role_of_the_template_alone_is_named_itself():
    row = {"messages": [ASK, turn("critic", "no"), SAY]}
    assert shape_of("messages", row, roles={"critic": "critic"})(row) == row


def test_one_of_the_first_rows_with_other_names_has_all_of_them_read():
    rows = [{"messages": [ASK, SAY]}, {"messages": [turn("human", "q"), turn("gpt", "a")]}]
    shape = recognised("messages", ["messages"], rows, {}, None, "text", lambda: True)
    assert [shape(row) for row in rows] == [rows[0]] * 2
