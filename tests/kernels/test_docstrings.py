"""The docstrings of kernel files: a legend of the shapes, and lines of arguments that name what the argument is."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.py")), ids=lambda path: path.stem)
def test_a_file_with_kernels_has_a_legend_of_its_shapes(path):
    source = path.read_text()
    if "@triton.jit" in source or "@gluon.jit" in source:
        assert "\nShapes: " in str(ast.get_docstring(ast.parse(source)))


def test_lines_of_arguments_begin_with_a_noun():
    pronoun = re.compile(r"^\s+[a-z_0-9*]+: (Of|That|Those|What|In)\b.*", re.MULTILINE)
    assert not [match[0] for path in FOLDER.rglob("*.py") for match in pronoun.finditer(path.read_text())]
