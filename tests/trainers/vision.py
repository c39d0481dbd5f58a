"""Tiny multimodal models with processors that are built offline, and data with pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image as Picture
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, Qwen2VLImageProcessorPil, Qwen2VLProcessor

from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import WORDS, tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
)


def _tokenizer(ids: dict[str, int], **names: str) -> Any:
    """The tiny tokenizer with special tokens at the ids that the tiny models expect."""
    made = tokenizer()
    filler = 0
    while len(made) <= max(ids.values()):
        name = next((name for name, index in ids.items() if index == len(made)), None)
        made.add_tokens([name or f"<unused{filler}>"], special_tokens=True)
        filler += 1
    assert {name: made.convert_tokens_to_ids(name) for name in ids} == ids
    for attribute, name in names.items():
        setattr(made, attribute, name)
        setattr(made, f"{attribute}_id", ids[name])
    return made


def _gemma3() -> Gemma3Processor:
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tokens = _tokenizer({"<boi>": 120, "<eoi>": 121, "<image>": 122}, **names)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokens, CHAT_TEMPLATE.replace("IMAGE", "<boi>"), image_seq_length=4)


class _ImagesAlone(Qwen2VLProcessor):
    """Without a video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def _qwen2_vl() -> Qwen2VLProcessor:
    ids = {"<|image_pad|>": 120, "<|video_pad|>": 121, "<|vision_start|>": 122, "<|vision_end|>": 123}
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 256}
    )
    template = CHAT_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return _ImagesAlone(images, _tokenizer(ids), None, template)


PROCESSORS = {"gemma3": _gemma3, "qwen2_vl": _qwen2_vl}


def save_vision_models(folder: Any) -> dict[str, str]:
    """Folders with the tiny multimodal models, as reference models are loaded from where a policy was."""
    for name in PROCESSORS:
        TINY_MODELS[name]().save_pretrained(folder / name)
    return {name: str(folder / name) for name in PROCESSORS}


def _says(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _rows(n: int, **columns: Any) -> Dataset:
    noise = np.random.default_rng(0)
    pictures = [Picture.fromarray(noise.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(n)]
    rows = [{"images": [pictures[i]], **{name: make(i) for name, make in columns.items()}} for i in range(n)]
    return Dataset.from_list(rows)


def _word(offset: int, role: str) -> Any:
    return lambda i: _says(role, WORDS[(i + offset) % 4])


def dialogues(n: int = 8) -> Dataset:
    """For SFT."""
    return _rows(n, messages=lambda i: _word(0, "user")(i) + _word(1, "assistant")(i))


def pairs(n: int = 8) -> Dataset:
    """For DPO."""
    return _rows(n, prompt=_word(0, "user"), chosen=_word(1, "assistant"), rejected=_word(2, "assistant"))


def prompts(n: int = 8) -> Dataset:
    """For GRPO."""
    return _rows(n, prompt=_word(0, "user"))
