"""Prompts that are computed once for several completions: the plan of their attention, and the mask that it stands for.

The tokens of a group, in one row: its prompt, then its completions. A completion sees its prompt and itself.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from liger_trainer.kernels.attention.plan import AttentionPlan, SharedKeys
from liger_trainer.kernels.copied_rows import copies_of


class Group(NamedTuple):
    """Numbers of tokens."""

    prompt: int
    completions: tuple[int, ...]


def tokens_of(groups):
    return sum(group.prompt + sum(group.completions) for group in groups)


def plan_of(groups, window, device="cpu", trimmed=True):
    """Documents are prompts, and completions that are not empty; with `trimmed`, no key is beyond every window."""
    lengths, keys, first = [], [], 0
    for prompt, completions in groups:
        seen = min(prompt, window - 1) if window and trimmed else prompt
        start = first + prompt
        documents = [range(first, start)] if prompt else []
        for length in filter(None, completions):
            documents.append([*range(first + prompt - seen, first + prompt), *range(start, start + length)])
            start += length
        lengths += [*([prompt] if prompt else []), *filter(None, completions)]
        keys += documents
        first = start

    def offsets(counts):
        return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)

    copies = copies_of(torch.tensor([*itertools.chain(*keys)]), tokens_of(groups))
    copies = type(copies)(*(part.to(device) for part in copies))
    # Bounds on the lengths may be loose.
    shared = SharedKeys(copies, offsets(map(len, keys)), max(map(len, keys)) + 2)
    return AttentionPlan(window, offsets(lengths), max(lengths) + 3, keys=shared)


def mask_of(groups, window):
    """(T, T), from what each token is: of which group, at which position in its row, and in which completion."""
    tokens = [
        (number, position, completion)
        for number, (prompt, completions) in enumerate(groups)
        for completion, positions in enumerate(
            [range(prompt), *(range(prompt, prompt + length) for length in completions)]
        )
        for position in positions
    ]
    group, position, completion = torch.tensor(tokens).T
    distance = position[:, None] - position
    seen = (group[:, None] == group) & (distance >= 0) & ((completion == 0) | (completion[:, None] == completion))
    return seen & (distance < window) if window else seen
