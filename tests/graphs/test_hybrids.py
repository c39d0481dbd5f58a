"""Layers of hybrids that run from graphs: rows of other documents share one, and nobody sees the empty ones."""

import copy

import pytest
import torch

from liger_trainer.graphs.calls import Held, arguments_of, fixed, tensors_of
from liger_trainer.graphs.captured import CapturedLayers
from liger_trainer.kernels.documents import Documents, documents_of, resolved
from liger_trainer.patching.apply import apply_liger_kernel
from tests.graphs.recorded import RecordedCaptures
from tests.tiny_models import TINY_MODELS

LENGTHS = [(70, 60, 10), (140,), (1, 100, 39), (64, 64, 12), (5, 5, 5, 125), (66, 66, 8), (139, 1)]
"""Documents of rows of 140 tokens, in two to four chunks of 64 tokens or less."""


@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_rows_share_a_graph(checkpointed):
    torch.manual_seed(0)
    model = TINY_MODELS["lfm2"]().train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_liger_kernel(model)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number, lengths in enumerate(LENGTHS):
        ids = torch.randint(3, 90, (1, 140), generator=torch.Generator().manual_seed(number))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
        with captured.attached(model):
            loss = model(**batch).loss
        loss.backward()
        expected = other(**batch).loss
        expected.backward()
        assert torch.equal(loss, expected)
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, twin.grad)
    kinds = {len(known.graphs) for known in captured._of.values()}
    assert not captured.reasons
    assert kinds == {1}


def in_graph(documents):
    """The documents that a graph of a layer is given."""
    hidden = torch.ones(1, 140, 4)
    arguments = arguments_of(hidden, (), {"documents": documents})
    copies = [Held(*each).tensor for each in tensors_of(arguments.leaves)]
    return arguments.key, fixed(arguments, copies, hidden, True).leaves[0]


def test_tables_are_filled_with_documents_and_chunks_without_tokens():
    made = [in_graph(documents_of(lengths)) for lengths in LENGTHS]
    assert len({key for key, _ in made}) == 1
    for lengths, (_, found) in zip(LENGTHS, made):
        expected = documents_of(lengths)
        for name, empty in (("spans", [0, 0, -1, 0, 0, 0]), ("chunks", [0, 0, 0])):
            table, rows = getattr(found, name), getattr(expected, name)
            assert torch.equal(table, torch.cat([rows, rows.new_tensor([empty] * (32 - len(rows)))]))
        assert found.roots == 32


def test_documents_that_continue_others_stay_as_many():
    forked = documents_of([60, 40, 40], parents=[-1, 0, 0])
    _, found = in_graph(forked)
    assert torch.equal(found.spans, forked.spans)
    assert (found.roots, len(found.chunks)) == (1, 32)
    more = documents_of([50, 40, 30, 20], parents=[-1, 0, 0, 0])
    assert in_graph(forked)[0] != in_graph(more)[0]


def test_rows_without_documents_of_their_own_have_no_tables():
    _, found = in_graph(Documents())
    assert found == Documents()


def test_tables_of_rows_stay_for_graphs_that_read_them():
    first = resolved(Documents(), torch.ones(1, 7, 2))
    for length in range(8, 200):
        resolved(Documents(), torch.ones(1, length, 2))
    assert resolved(Documents(), torch.ones(1, 7, 2)).spans is first.spans
