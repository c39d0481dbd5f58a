"""`make fast` names tests, and each name is still a test's."""

import re

from tests.fast import FOLDERS, SOME, TESTS


def test_every_name_is_a_tests():
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    functions = {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    assert not SOME.keys() - functions
    assert all((TESTS / folder).is_dir() for folder in FOLDERS)
