"""The answers of a conversation, found by its turns, and those that TRL's templates for training mark."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest
import trl
from datasets import Dataset, Features, Json, List
from transformers.utils.chat_template_utils import render_jinja_template

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.data.response_labels import answer_mask, answer_spans
from liger_trainer.errors import UserError
from liger_trainer.head import warn_once
from liger_trainer.recipe.smoke import train_tokenizer
from liger_trainer.trainers.sft_trainer import some_are_not_learnt
from tests.trainers.builders import llama

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in TEMPLATES.glob("*_training.jinja"))
PICTURES_ONLY = ("idefics3_training", "smolvlm_training", "llava_next_training")  # whose content is never plain text
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CONVERSATIONS = {
    "one answer": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}],
    "several answers": [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Hello."},
    ],
    "thoughts": [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "hm"},
        {"role": "user", "content": "Hi again?"},
        {"role": "assistant", "content": "No", "reasoning_content": "so"},
    ],
    "tools": [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "content": "3"},
        {"role": "assistant", "content": "three"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "</s>", "<s>"),
    *("<start_of_turn>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
    *("<|observation|>", "<|tool_call_end|>", "<|eot|>", "<|eom|>"),
]
REFUSED = [
    *((name, "tools") for name in ("cohere2_training", "cohere_training", "gemma3_training", "gemma_training")),
    ("gemma_training", "several answers"),
]
"""Conversations with turns that a template refuses."""
SCAFFOLD = re.compile(r"<｜Assistant｜>|<\|start\|>assistant|<｜tool▁outputs▁end｜>|</?think>|\s")
"""What some templates mark though every generation prompt has it, and blanks after the token that ends an answer."""


@pytest.mark.parametrize("talk", CONVERSATIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PICTURES_ONLY])
def test_answers_are_those_that_the_template_marks(name, talk):
    marked, turns = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), CONVERSATIONS[talk]
    plain = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 if true \2", marked)
    plain = re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endif \2", plain)
    options = {"bos_token": "<s>", "eos_token": "</s>", "tools": TOOLS if talk == "tools" else None}

    def render(turns, add_generation_prompt=False):
        more = {**options, "add_generation_prompt": add_generation_prompt}
        return render_jinja_template([list(turns)], chat_template=plain, **more)[0][0]

    if (name, talk) in REFUSED:
        with pytest.raises(jinja2.TemplateError):
            render(turns)
        return
    (text,), marks = render_jinja_template([turns], chat_template=marked, return_assistant_tokens_mask=True, **options)
    assert render(turns) == text
    wanted = {place for start, end in marks[0] for place in range(start, end)}
    found = {place for start, end in answer_spans(turns, render, SPECIAL) for place in range(start, end)}
    more = "".join(text[place] for place in sorted(found - wanted))
    assert more in ("", "<|tool_response>")  # at which Gemma 4 stops after a tool call
    assert not SCAFFOLD.sub("", "".join(text[place] for place in sorted(wanted - found)))
    assert "Hello." not in text or "H" in {text[place] for place in found}


LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} {{ eos_token }}{% else %}<<SYS>>{{ m.content }}<</SYS>>"
    "{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MISTRAL = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_HEADER = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def tokenizer_with(template):
    tokenizer = train_tokenizer(["Hi? Hello. And again, this is so. <think> system user assistant"] * 20, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": "<s>"})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "talk", "answers"),
    [
        (CHATML, "several answers", "Hello.<|im_end|>Hello.<|im_end|>"),
        (LLAMA_2, "several answers", "Hello. EOSHello. EOS"),
        (NO_HEADER, "several answers", "Hello.Hello."),
        (STRIPS_THOUGHTS, "in content", "Yes<|im_end|><think>so</think>No<|im_end|>"),
    ],
)
def test_answers_of_templates_without_markers(template, talk, answers):
    tokenizer = tokenizer_with(template)
    thoughts = [
        *({"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "<think>hm</think>Yes"}),
        *({"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "<think>so</think>No"}),
    ]
    found = answer_mask({**CONVERSATIONS, "in content": thoughts}[talk], tokenizer)
    said = tokenizer.decode([one for one, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own])
    assert said.replace(" ", "") == answers.replace("EOS", tokenizer.eos_token).replace(" ", "")


def model_for(tokenizer):
    model = llama()
    model.resize_token_embeddings(len(tokenizer))
    return model


@pytest.mark.parametrize("rows", ["messages", "prompt and completion"])
def test_the_trainer_learns_the_answers_alone(rows, tmp_path):
    tokenizer, turns = tokenizer_with(CHATML), CONVERSATIONS["several answers"]
    row = {
        "messages": {"messages": turns},
        "prompt and completion": {"prompt": turns[:4], "completion": turns[4:]},
    }[rows]
    args = LigerSFTConfig(
        str(tmp_path / "run"), assistant_only_loss=True, use_cpu=True, report_to="none", kernel_report=False
    )
    trainer = LigerSFTTrainer(
        model_for(tokenizer), args, train_dataset=Dataset.from_list([row] * 4), processing_class=tokenizer
    )
    assert trainer.answers_by_turns
    batch = next(iter(trainer.get_train_dataloader()))
    learnt = tokenizer.decode(batch["input_ids"][0][batch["labels"][0] != -100])
    assert learnt == "Hello.<|im_end|>" * (1 if rows == "prompt and completion" else 2)
    evaluated = trainer._prepare_dataset(Dataset.from_list([row]), tokenizer, args, False, None, "eval")
    assert {"input_ids", "labels"} <= {*evaluated.column_names}


MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
)


def learnt_of(turns, template, folder, **options):
    """The trainer of a conversation, and the text of the labels in its first batch."""
    args = LigerSFTConfig(folder, use_cpu=True, report_to="none", kernel_report=False, **options)
    rows, tokenizer = Dataset.from_list([{"messages": turns}] * 4), tokenizer_with(template)
    trainer = LigerSFTTrainer(model_for(tokenizer), args, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer, trainer.processing_class.decode(batch["input_ids"][0][batch["labels"][0] != -100])


def test_a_template_with_markers_is_left_to_trl(tmp_path):
    turns = CONVERSATIONS["several answers"]
    trainer, learnt = learnt_of(turns, MARKED, str(tmp_path / "run"), assistant_only_loss=True)
    assert not trainer.answers_by_turns
    assert learnt == "Hello.<|im_end|>Hello.<|im_end|>"


@pytest.mark.parametrize("said", [{"weight": 0}, {"train": False}], ids=str)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_an_answer_of_weight_0_is_not_learnt(template, said, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_said", set())
    turns = [{**turn} for turn in CONVERSATIONS["several answers"]]
    turns[2] = {**turns[2], "content": "Wrong.", **said}
    _, learnt = learnt_of(turns, template, str(tmp_path / "run"), assistant_only_loss=True)
    assert learnt == "Hello.<|im_end|>"
    assert "set `assistant_only_loss=True`" not in caplog.text
    _, learnt = learnt_of(turns, template, str(tmp_path / "all"))
    assert "Wrong." in learnt
    assert "set `assistant_only_loss=True` to leave them out" in caplog.text


@pytest.mark.parametrize("key", ["messages", "completion", "text"])
def test_streamed_weights_are_seen(key):
    turns = CONVERSATIONS["one answer"]
    weighed = [turns[0], {**turns[1], "weight": 0}]
    for row, expected in ((turns, False), (weighed, key != "text")):
        rows = Dataset.from_list([{key: turns}, {key: row}], features=Features({key: List(Json())}))
        assert some_are_not_learnt(rows) == some_are_not_learnt(rows.to_iterable_dataset()) == expected


def test_a_weight_between_0_and_1_is_refused(tmp_path):
    turns = [*CONVERSATIONS["one answer"][:1], {"role": "assistant", "content": "Hello.", "weight": 0.5}]
    with pytest.raises(UserError, match=re.escape("a turn with `weight: 0.5`; 0 and 1 are known")):
        learnt_of(turns, CHATML, str(tmp_path / "run"), assistant_only_loss=True)


def test_tool_calls_before_the_question_at_which_the_tools_stand():
    tokenizer, twice = tokenizer_with(MISTRAL), CONVERSATIONS["tools"] * 2
    twice[4] = {"role": "user", "content": "Again?"}
    found = answer_mask(twice, tokenizer, tools=TOOLS)
    said = tokenizer.decode([one for one, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own])
    end = tokenizer.eos_token
    call = f'[TOOL_CALLS][{{"type": "function", "function": {{"name": "f", "arguments": {{"x": 1}}}}}}]{end}'
    assert said == f"{call}three{end}{call}three{end}"


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    args = LigerSFTConfig(str(tmp_path / "run"), assistant_only_loss=True, use_cpu=True, report_to="none")
    data = Dataset.from_list([{"messages": CONVERSATIONS["one answer"]}] * 4)
    with pytest.raises(ValueError, match="the tokenizer has no chat template; name one in `chat_template_path`"):
        LigerSFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer_with(None))
