"""The convolutions token by token, and documents of every kind of length, for the tests of this folder."""

import torch

from liger_trainer.kernels.documents import documents_of
from tests.kernels.document_places import places

LENGTHS = [3, 70, 1, 2, 64, 65, 0, 63, 5, 1, 7, 130, 0, 2]
PARENTS = [-1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 2, 4, 5, 6]
TOKENS = sum(LENGTHS) + 7


def every_kind(device="cpu", parents=PARENTS):
    """Documents of these lengths in a batch of `TOKENS`, some of which are of none."""
    firsts, place = [], 3
    for number, length in enumerate(LENGTHS):
        firsts.append(place)
        place += length + (number % 4 == 1)
    return documents_of(LENGTHS, firsts, parents, tokens=TOKENS, device=device)


def histories(x, halo, documents, initial_state=None):
    """For each document the rows (halo + its tokens, channels): what comes before its first token, and its tokens."""
    found = []
    for number, (first, behind, parent) in enumerate(places(documents)):
        before = x.new_zeros(halo, x.shape[-1])
        if parent >= 0:
            before = found[parent][len(found[parent]) - halo :]
        elif initial_state is not None:
            before = initial_state[number]
        found.append(torch.cat([before, x.flatten(0, 1)[first:behind]]))
    return found


def conv_loop(x, weight, bias, documents, initial_state=None):
    """`conv(x) + bias` of each token, 0 for those of no document, and the last inputs of each document."""
    halo = weight.shape[1] - 1
    y = [x.new_zeros(x.shape[-1])] * x.flatten(0, 1).shape[0]
    of_documents = histories(x, halo, documents, initial_state)
    for (first, behind, _), rows in zip(places(documents), of_documents):
        for token in range(behind - first):
            pre = (rows[token : token + halo + 1] * weight.T).sum(0)
            y[first + token] = pre if bias is None else pre + bias
    return torch.stack(y).view_as(x), torch.stack([rows[len(rows) - halo :] for rows in of_documents])


def in_documents(documents, tokens):
    """Which tokens of the flattened batch are of a document."""
    inside = torch.zeros(tokens, dtype=torch.bool)
    for first, behind, _ in places(documents):
        inside[first:behind] = True
    return inside
