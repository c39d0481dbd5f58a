"""Two dimensions of parallelism on four gloo processes: FSDP2 with tensor or expert parallelism, and HSDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.matrix_wrappings import _fsdp2
from tests.distributed.tensor_parallel import (
    FAMILIES,
    Case,
    batch_of,
    check_step,
    kernels_in,
    load_split,
)
from tests.distributed.test_expert_parallel import model_is_that_of_one_process, random_choices, rows_are_those_of_one

RANKS = 4
RESHARDED = {"fsdp_plan": {"lm_head": "free_full_weight", "model.norm": "free_full_weight"}}


def _fsdp_and_tp(rank: int, case: Case, **config: Any) -> None:
    """transformers' mesh: ranks 0 and 1 split what they have of the model, and so do 2 and 3, with other rows."""
    model = kernels_in(load_split(FAMILIES[case.family](**case.overrides), tp_size=2, fsdp_size=2, **config), case)
    for _ in range(2):
        model.zero_grad()
        check_step(model, case, [batch_of(case, step) for step in range(2)], rank // 2)


def _hsdp(rank: int, case: Case, units: str, reshard: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = kernels_in(FAMILIES[case.family](**case.overrides).train().to(device), case)
    wrapped = _fsdp2(model, None, units, reshard, (2, 2))
    for _ in range(2):
        wrapped.zero_grad()
        check_step(wrapped, case, [batch_of(case, step) for step in range(RANKS)], rank)


def _tp_of_four(rank: int, case: Case) -> None:
    model = kernels_in(load_split(FAMILIES[case.family](**case.overrides), tp_size=RANKS), case)
    check_step(model, case, [batch_of(case)])


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
CASES = {
    "fsdp2 and tp": partial(_fsdp_and_tp, case=Case(loss="grpo")),
    "fsdp2 and tp, tied": partial(_fsdp_and_tp, case=Case("gemma3_text", "sft")),
    "fsdp2 and tp, odd vocabulary": partial(_fsdp_and_tp, case=Case("qwen3", overrides={"vocab_size": 127})),
    "fsdp2 and tp, resharded": partial(_fsdp_and_tp, case=Case(loss="sft"), **RESHARDED),
    "hsdp tail": partial(_hsdp, case=Case("qwen3", "grpo"), units="tail", reshard=False),
    "hsdp head alone, resharded": partial(_hsdp, case=Case(loss="sft"), units="head alone", reshard=True),
    "hsdp tied, resharded": partial(_hsdp, case=Case("gemma3_text"), units="tail", reshard=True),
    "two copies of each expert": partial(model_is_that_of_one_process, fsdp_size=4, ep_size=2),
    "tokens of two processes, experts of four": partial(
        model_is_that_of_one_process, fsdp_size=2, tp_size=2, ep_size=4
    ),
    "rows to experts of four": partial(
        rows_are_those_of_one, tokens=[0, 7, 3, 1], choose=random_choices, dtype=torch.float64
    ),
    "tp of four": partial(_tp_of_four, case=Case(loss="dpo", overrides={"vocab_size": 126, **HEADS})),
}


@pytest.mark.parametrize("case", CASES)
def test_four_processes_train_as_one(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
