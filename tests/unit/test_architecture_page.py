"""Every path that docs/architecture.md names exists, and every floor of the code is on it."""

import re

import pytest

from tests.support.fits import ROOT
from tests.unit.test_architecture import FLOORS

TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`([\w./]+(?:/|\.(?:py|md|yml)))`", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_named_exists(path):
    assert (ROOT / path).exists() or (ROOT / "datamask_pl" / path).exists()


@pytest.mark.parametrize(("path", "names"), re.findall(r"`([\w/]+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)", TEXT))
def test_what_is_named_beside_a_file_is_in_it(path, names):
    source = (ROOT / "datamask_pl" / path).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+)`", names):
        assert re.search(rf"\b{name.split('.')[-1]}\b", source), f"{path} has no {name}"


def test_every_room_of_the_package_is_on_a_floor_of_the_page():
    named = set(re.findall(r"`(\w+)(?:/|\.py)`", "".join(re.findall(r"^\| \d.*$", TEXT, re.MULTILINE))))
    assert set().union(*FLOORS) - {"__main__", "_moved"} == named


def test_the_page_stays_short():
    assert len(TEXT.splitlines()) <= 120
