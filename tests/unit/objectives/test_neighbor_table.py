"""The lists of samples that have many copies."""

import numpy as np
import pytest
import torch

from datamask_pl.functional.neighbors import duplicates, exact, inverted_file
from datamask_pl.functional.terms import facility_location
from datamask_pl.objectives import FacilityLocation
from datamask_pl.objectives.neighbor_table import build_table
from tests.support.pretended_ranks import on_ranks
from tests.support.problems import ground_set, random_masks, unit_rows

DTYPES = [torch.float32, torch.float64]


def with_copies(num_samples=700):
    features_ND = unit_rows(num_samples, 5, 0)
    order = np.random.default_rng(1).permutation(num_samples)
    for start, count in [(0, 150), (150, 90), (240, 40)]:
        features_ND[order[start : start + count]] = features_ND[order[start]]
    # nearly the same as the first copies, and more similar to them than they are to each other, where that rounds up
    features_ND[order[300:320]] = features_ND[order[0]] * np.linspace(1 - 1e-7, 1 + 1e-7, 20)[:, None]
    return features_ND


def lists(table):
    order_V = table.rows_V.argsort()
    assert torch.equal(table.rows_V[order_V], torch.arange(len(order_V)))
    return table.similarity_TV[:, order_V], table.neighbor_TV[:, order_V]


def table_of(features_ND, *, dtype=torch.float32, num_neighbors=25, ranks=None, search="exact", helpers=None):
    ground = ground_set(features_ND, 70, dtype=dtype, num_slice_rows=90, ranks=ranks)
    if helpers is not None:
        ground = ground.unshared(helpers)
    return build_table(ground, num_neighbors=num_neighbors, search=search, wanted_recall=0.95)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(exact, "MAX_UNBOUNDED", 64)
    monkeypatch.setattr(exact, "PANEL_ROWS", 64)
    monkeypatch.setattr(facility_location, "LIST_ROWS", 64)
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 40)


@pytest.fixture
def without_copies(monkeypatch):
    def switch():
        monkeypatch.setattr(duplicates, "MIN_DUPLICATES", 10**9)

    return switch


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_neighbors", [1, 2, 25, 39, 60, 120])
def test_exact_lists_are_bit_for_bit_those_of_a_search_among_all_copies(dtype, num_neighbors, without_copies):
    found = lists(table_of(with_copies(), dtype=dtype, num_neighbors=num_neighbors))
    without_copies()
    expected = lists(table_of(with_copies(), dtype=dtype, num_neighbors=num_neighbors))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[1].dtype == torch.int32


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("search", ["exact", "approximate"])
@pytest.mark.parametrize("is_helped", [False, True])
def test_ranks_hold_together_the_lists_that_one_finds(search, is_helped):
    expected = lists(table_of(with_copies(), search=search))

    def job(ranks):
        options = {"helpers": ranks} if is_helped else {"ranks": ranks}
        return table_of(with_copies(), search=search, **options)

    tables = on_ranks(3, job)
    for table in tables:
        assert table.chunks[-1].stop == len(table.rows_V) == table.neighbor_TV.shape[1]
        assert [chunk.start for chunk in table.chunks[1:]] == [chunk.stop for chunk in table.chunks[:-1]]
    if is_helped:
        together = [lists(table) for table in tables]
    else:
        rows_V = torch.cat([table.rows_V for table in tables])
        parts = (
            torch.cat([getattr(table, name) for table in tables], dim=1) for name in ("similarity_TV", "neighbor_TV")
        )
        together = [tuple(part[:, rows_V.argsort()] for part in parts)]
        assert torch.equal(rows_V.sort().values, torch.arange(700))
    for found in together:
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.usefixtures("small_parts")
def test_approximate_lists_of_copies_begin_with_the_sample_and_then_have_its_first_copies():
    features_ND = with_copies()
    similarity_TN, neighbor_TN = lists(table_of(features_ND, search="approximate"))
    assert neighbor_TN[0].tolist() == list(range(700))
    rows = [tuple(row) for row in features_ND.astype(np.float32).tolist()]
    first = [row for row in range(700) if rows[row] == max(set(rows), key=rows.count)][:25]
    for row in [first[-1], *[row for row in range(700) if rows[row] == rows[first[0]]][-3:]]:
        # what is as similar as a copy but for rounding may come before
        copies_found = [other for other in neighbor_TN[1:, row].tolist() if rows[other] == rows[row]]
        assert copies_found == [other for other in first if other != row][: len(copies_found)]
        assert len(copies_found) >= 4
        np.testing.assert_allclose(similarity_TN[:, row], 1.0, atol=1e-3)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_neighbors", [3, 60])
def test_values_are_those_of_a_search_among_all_copies(dtype, num_neighbors, without_copies):
    masks_RN = torch.tensor(random_masks(4, 700, 70, 0))
    objective = FacilityLocation(num_neighbors=num_neighbors)

    def values():
        return objective.value(masks_RN, ground_set(with_copies(), 70, dtype=dtype)).tolist()

    found = values()
    without_copies()
    assert found == values()


def test_copies_are_not_multiplied_with_each_other(monkeypatch):
    multiplied = []
    pair_products = exact.SimilarPairs.at_least

    def counted(self, left_PD, right_CD, *bounds):
        multiplied.append(len(left_PD) * len(right_CD))
        return pair_products(self, left_PD, right_CD, *bounds)

    monkeypatch.setattr(exact.SimilarPairs, "at_least", counted)
    build_table(ground_set(np.ones((20_000, 2)) / 2**0.5, 2000), num_neighbors=60, search="auto", wanted_recall=0.95)
    assert sum(multiplied) < 20_000
