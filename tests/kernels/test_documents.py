"""The tables of documents: chunks, parents and their children."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from liger_trainer.kernels.documents import (
    CHILDREN,
    CHUNK,
    FIRST_CHILD,
    FIRST_CHUNK,
    ROWS,
    documents_of,
    resolved,
)
from tests.kernels.document_places import places


def test_chunks_begin_with_their_document():
    documents = documents_of([CHUNK + 1, 0, 3, 2 * CHUNK])
    assert documents.chunks.tolist() == [
        [0, 0, CHUNK],
        [0, CHUNK, 1],
        [2, CHUNK + 1, 3],
        [3, CHUNK + 4, CHUNK],
        [3, 2 * CHUNK + 4, CHUNK],
    ]
    assert documents.spans[:, FIRST_CHUNK].tolist() == [0, 2, 2, 3]
    assert not documents.padding


def test_documents_without_a_parent_come_first_and_children_follow_each_other():
    documents = documents_of([4, 2, 3, 5, 6, 1], parents=[-1, 3, 0, -1, 0, 3])
    assert places(documents) == [(0, 4, -1), (9, 14, -1), (6, 9, 0), (14, 20, 0), (4, 6, 1), (20, 21, 1)]
    assert documents.roots == 2
    assert documents.spans[:2, FIRST_CHILD].tolist() == [2, 4]
    assert documents.spans[:, CHILDREN].tolist() == [2, 2, 0, 0, 0, 0]


def test_tokens_of_no_document_are_padding():
    documents = documents_of([3, 2], firsts=[1, 6], tokens=10)
    assert documents.padding
    assert places(documents) == [(1, 4, -1), (6, 8, -1)]


def test_rows_are_documents():
    assert places(resolved(ROWS, torch.zeros(2, 5, 3))) == [(0, 5, -1), (5, 10, -1)]


def test_tables_of_fake_tensors_are_not_those_of_real_ones():
    with FakeTensorMode():
        assert isinstance(resolved(ROWS, torch.empty(3, 7, 2)).spans, FakeTensor)
    real = resolved(ROWS, torch.zeros(3, 7, 2))
    assert places(real) == [(0, 7, -1), (7, 14, -1), (14, 21, -1)]
    with FakeTensorMode():
        assert isinstance(resolved(ROWS, torch.empty(3, 7, 2)).spans, FakeTensor)


@pytest.mark.parametrize(
    ("lengths", "more", "words"),
    [
        ([1.7, 2], {}, "`lengths` is .*; give one whole number for each"),
        ([[1, 2]], {}, "`lengths` is .*; give one whole number for each"),
        ([1, 2, 3], {"parents": [-1, 0]}, "`parents` has 2 numbers; give one for each of the 3"),
        ([1, 2], {"parents": [-1, 2]}, "`parents` must be numbers of the 2 documents"),
        ([3, -1], {}, "A document is not within the 2 tokens"),
        ([3], {"firsts": [-1], "tokens": 4}, "A document is not within the 4 tokens"),
        ([3, 3], {"tokens": 5}, "A document is not within the 5 tokens"),
        ([3, 3], {"firsts": [0, 2], "tokens": 6}, "Two documents have tokens in common"),
    ],
)
def test_tables_that_would_read_elsewhere_are_refused(lengths, more, words):
    with pytest.raises(ValueError, match=words):
        documents_of(lengths, **more)


def test_documents_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="`documents` are those of 8 tokens, and the batch has 20"):
        resolved(documents_of([8]), torch.zeros(1, 20, 2))


def test_tables_that_inference_made_serve_a_training():
    with torch.inference_mode():
        documents = documents_of([8])
    assert not documents.spans.is_inference()


def test_a_parent_with_a_parent_is_refused():
    with pytest.raises(ValueError, match="`parents` names a document that continues another one itself"):
        documents_of([1, 1, 1], parents=[-1, 0, 1])
