"""The text of the benchmarks that train: theirs is the standard library, which differs between versions of Python."""

import pytest
import torch

from liger_trainer.benchmarks import fp8, optimizers

WORDS = b"def return self import yield lambda global assert".split()


def sentences() -> dict[str, bytes]:
    """Random words, of which one follows from its predecessor half the time."""
    found = {}
    for part in ("pretraining", "fine-tuning", "held-out"):
        drawn = torch.randint(len(WORDS), (10_000,)).tolist()
        follows = torch.rand(len(drawn)) < 0.5
        for place in follows.nonzero().flatten().tolist():
            drawn[place] = (drawn[place - 1] + 1) % len(WORDS)
        found[part] = b" ".join(WORDS[word] for word in drawn)
    return found


@pytest.fixture(scope="module")
def small_corpus():
    """In the place of `corpus`, for the tests of a file."""
    text = sentences()
    with pytest.MonkeyPatch.context() as patch:
        for module in (fp8, optimizers):
            patch.setattr(module, "corpus", lambda: text)
        yield text
