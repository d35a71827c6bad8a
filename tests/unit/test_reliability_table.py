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


def is_first_tier(name):
    """Whether neither the test, nor its class, is marked slow as a whole; some of its cases may be."""
    path, *names = name.split("::")
    nodes = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8")).body
    for name in names:
        (node,) = [node for node in nodes if getattr(node, "name", None) == name]
        if "pytest.mark.slow" in map(ast.unparse, node.decorator_list):
            return False
        nodes = node.body
    return True


def test_every_promise_is_held_by_the_first_tier():
    rows = [re.findall(r"`([\w/]+\.py::[\w:]+)`", line) for line in TEXT.splitlines()]
    assert [row for row in rows if row and not any(map(is_first_tier, row))] == []


def test_every_row_of_every_table_names_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not re.match(r"\| (case|promise) \|", line)]
    assert len(rows) > 45
    assert [row for row in rows if "::test_" not in row] == []
