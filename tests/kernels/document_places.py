"""Where the documents of a table are, on the host."""

from liger_trainer.kernels.documents import Documents


def places(documents: Documents) -> list[tuple[int, int, int]]:
    """The first token, the place behind the last, and the parent of each document, on the host; parents come first."""
    assert documents.spans is not None
    return [(first, first + tokens, parent) for first, tokens, parent, *_ in documents.spans.tolist()]
