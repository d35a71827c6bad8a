"""Every test that docs/reliability.md names is there."""

import ast
import re

import pytest

from tests.support.fits import ROOT

TEXT = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::[\w:]+)`", TEXT)))


def names_in(path):
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef):
            yield node.name


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_exists(name):
    path, _, test = name.partition("::")
    assert (ROOT / "tests" / path).is_file()
    assert test in set(names_in(path))
    assert test.split("::")[-1].startswith("test_")


def test_every_row_of_every_table_names_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not re.match(r"\| (case|promise) \|", line)]
    assert len(rows) > 45
    assert [row for row in rows if "::test_" not in row] == []
