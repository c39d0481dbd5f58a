"""The benchmark of steps on recorded rollouts: everything computes the same loss, on as few tokens as is said."""

import argparse
import gc
import weakref

import pytest
import torch

from liger_trainer.benchmarks import tree_step
from liger_trainer.benchmarks.records import UNSHARED
from liger_trainer.benchmarks.tree_step import ONE_LEVEL, PROVIDERS, TREE, TRL

SIZES = {"groups": 2, "group": 3, "prompt": 9, "system": 8, "conversations": 2, "turns": 4, "result": 2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "lora"), [("tree", "4"), ("groups", "0")])
def test_every_way_of_sharing(shape, lora, monkeypatch, capsys):
    pytest.importorskip("trl.experimental.async_grpo.packing")
    found, trainers = {}, []
    measure, collected = tree_step.measure, tree_step.Steps

    def measured(provider, task, rollouts, *args):
        found["rows"] = rollouts
        found[provider] = measure(provider, task, rollouts, *args)
        return found[provider]

    class Steps(collected):
        def on_train_begin(self, *args, model, **kwargs):
            trainers.append(weakref.ref(model))
            super().on_train_begin(*args, **kwargs)

    monkeypatch.setattr(tree_step, "measure", measured)
    monkeypatch.setattr(tree_step, "Steps", Steps)
    options = {"model": "tiny", "device": "cpu", "shapes": shape, "lora": lora, "lengths": "3:7", "steps": 1, **SIZES}
    tree_step.main([f"--{name}={value}" for name, value in options.items()])
    rows, theirs = found.pop("rows"), found[TRL]
    assert list(found) == list(PROVIDERS)
    assert theirs.loss
    for each in found.values():
        assert each.loss == pytest.approx(theirs.loss, rel=1e-5)
    alone, one, tree = (found[name].tokens for name in (UNSHARED, ONE_LEVEL, TREE))
    assert alone == rows.lengths.sum()
    assert tree <= theirs.tokens < alone
    assert tree < one if shape == "tree" else tree == one
    assert f"{tree:,}" in capsys.readouterr().out
    gc.collect()
    assert [each() for each in trainers] == [None] * len(PROVIDERS)  # one in memory would count for the next


def test_rows_of_a_tree():
    """Rows of a conversation begin those of its next turn, and there are two of it from the middle on."""
    made = tree_step.Rollouts("tree", argparse.Namespace(**SIZES, lengths="3:7"), 10**6)
    assert made.prompt == 8 + 9
    assert len(made.tokens) == 2 * 2 * (2 + 2 * 2)
    rows = [row[:length].tolist() for row, length in zip(made.tokens, made.lengths.flatten())]
    begins = made.trained.argmax(1).tolist()
    for row, begin in zip(rows, begins):
        before = [each for each in rows if len(each) == begin - 2 and row[: begin - 2] == each]
        assert len(before) == (begin > made.prompt)
    ends = [row for row in rows if not any(each != row and each[: len(row)] == row for each in rows)]
    assert len(ends) == 2 * 2 * 2


@pytest.mark.gpu
def test_attention_of_the_trie_on_a_gpu():
    """Three segments, of which two go on after the first: flash attention sees what it should."""
    places = [*range(4), *range(7), *range(4), 7, 8]
    offsets = {"tree_cu_seqlens_q": [0, 4, 7, 9], "tree_cu_seqlens_k": [0, 4, 11, 17]}
    query, key, value = torch.randn(1, 4, 9, 64), *torch.randn(2, 1, 2, 9, 64)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        inputs = [each.to(device, dtype) for each in (query, key, value)]
        trie = {name: torch.tensor(each, dtype=torch.int32, device=device) for name, each in offsets.items()}
        trie |= {"tree_kv_index": torch.tensor(places, device=device), "tree_max_seqlen_q": 4, "tree_max_seqlen_k": 7}
        found.append(tree_step.tree_attention(None, *inputs, None, **trie, scaling=0.2)[0])
    torch.testing.assert_close(found[1].cpu().float(), found[0], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--turns", "0"], "sizes and `--steps` must be 1 or more"),
        (["--lengths", "9:3"], "`--lengths` is '9:3'; give a range such as 64:512"),
        (["--shapes", "trees"], "No shape 'trees'. Did you mean 'tree'?"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        tree_step.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
