"""Pictures can be drawn of any mask, and stand in a page by themselves."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

figures = pytest.importorskip("datamask_pl.evidence.figures", exc_type=ImportError)
from datamask_pl.evidence.histograms import histogram  # noqa: E402


def count(values):
    return histogram(torch.tensor(values), num_bins=4, low=0.0, high=1.0)


SHARES = torch.tensor([[torch.nan] * 9 + [1.0], [0.0] * 10])
COUNTS = torch.tensor([[0] * 9 + [1], [20] * 10])
POINTS = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
DRAWS = {
    "quality": lambda: figures.draw_quality(count([0.1, 0.2, 0.9]), count([0.9])),
    "quality of nothing": lambda: figures.draw_quality(count([]), count([])),
    "probability": lambda: figures.draw_probability(count([0.0, 1.0])),
    "probability of nothing": lambda: figures.draw_probability(count([])),
    "curves": lambda: figures.draw_curves(
        {
            "f": [figures.Curve("block 0", [1, 2], [0.0, 1.0]), figures.Curve("block 1", [1], [0.5])],
            "$\\nonsense{": [figures.Curve("", [1, 2], [float("nan"), 1.0])],
        },
        {"f": {"mask": 1.0, "random": 0.1, "top quality": 0.5}},
    ),
    "heat map": lambda: figures.draw_heat_map(SHARES, COUNTS),
    "heat map of nothing kept": lambda: figures.draw_heat_map(torch.zeros(1, 10), torch.ones(1, 10)),
    "map": lambda: figures.draw_map(POINTS, torch.tensor([0.5, 0.1]), {"the mask": POINTS[:, 0] > 0.5}),
    "map of all kept": lambda: figures.draw_map(POINTS[:1], torch.zeros(2), {"the mask": torch.tensor([True])}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_picture_in_a_page_refers_to_nothing_outside_and_takes_the_pages_ink(name):
    svg = figures.to_svg(DRAWS[name], label="What & where")
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "What & where"
    assert "currentColor" in svg
    assert "#000000" not in re.sub(r"<text.*?</text>", "", svg, flags=re.DOTALL) or name.startswith("heat map")
    references = [value for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in references)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)


def test_two_pictures_share_no_id():
    roots = [ElementTree.fromstring(figures.to_svg(DRAWS["curves"], label=label)) for label in ("one", "two")]
    ids = [[node.get("id") for node in root.iter() if node.get("id")] for root in roots]
    assert ids[0]
    assert len(set(ids[0] + ids[1])) == len(ids[0] + ids[1])


@pytest.mark.parametrize("name", DRAWS)
def test_a_picture_for_tensorboard_is_not_blank(name):
    image = figures.to_image(DRAWS[name])
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert (image[0, 0] == 255).all()
    assert image.std() > 1


def test_pictures_are_the_same_twice():
    assert figures.to_svg(DRAWS["map"], label="x") == figures.to_svg(DRAWS["map"], label="x")


@pytest.mark.parametrize(("count", "extend"), [(1, "max"), (500, "neither")])
def test_a_heat_map_whose_scale_ends_below_a_cell_of_few_samples_shows_it(count, extend):
    share_J10, count_J10 = torch.full((1, 10), 0.2), torch.full((1, 10), 500.0)
    share_J10[0, 9], count_J10[0, 9] = 1.0, count
    image = figures.draw_heat_map(share_J10, count_J10).axes[0].images[0]
    assert image.norm.vmax == pytest.approx(0.2 if count == 1 else 1.0)
    assert image.colorbar.extend == extend
