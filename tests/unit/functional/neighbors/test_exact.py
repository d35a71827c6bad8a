import itertools
import math

import numpy as np
import pytest
import torch

from datamask_pl.functional.neighbors import exact, pairs
from datamask_pl.functional.neighbors.exact import (
    GrowingLists,
    Seeds,
    finished_lists,
    nearest_neighbors,
    search_all,
    split_panels,
)
from datamask_pl.functional.neighbors.keys import EMPTY_KEY, index_of, similarity_of
from datamask_pl.functional.neighbors.pairs import SimilarPairs
from tests.support.tiers import only


def unit_rows(num_samples, num_features=5, seed=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_samples, num_features, generator=source, dtype=dtype))


def table(features_ND, num_neighbors, rows=None, edges=(0,)):
    edges = [*edges, len(features_ND)]
    slices = [slice(*pair) for pair in itertools.pairwise(edges)]
    rows = range(len(features_ND)) if rows is None else rows
    return nearest_neighbors(lambda some: features_ND[some], slices, rows, num_neighbors=num_neighbors)


def sorted_lists(features_ND, num_neighbors):
    cosine_NN = (features_ND @ features_ND.T).numpy()
    np.fill_diagonal(cosine_NN, 2.0)
    order_NT = np.argsort(-cosine_NN, axis=1, kind="stable")[:, :num_neighbors]
    similarity_NT = np.take_along_axis(cosine_NN, order_NT, axis=1)
    return np.clip(similarity_NT, 0.0, 1.0), order_NT


@pytest.fixture(params=["unbounded", "few-seeds", "many-seeds"])
def bounds(request, monkeypatch):
    """Small sets are searched without bounds unless told otherwise; few seeds give bounds that many rows find wrong."""
    if request.param != "unbounded":
        monkeypatch.setattr(exact, "MAX_UNBOUNDED", 0)
        monkeypatch.setattr(exact, "MIN_SEEDS", 3 if request.param == "few-seeds" else 100)


@pytest.mark.parametrize("panel_rows", only(2048, 7, of=[2048, 1, 7, 64]))
@pytest.mark.parametrize("num_neighbors", only(1, 7, of=[1, 2, 7, 120]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("bounds")
def test_lists_are_those_of_a_full_sort_whatever_the_panels(monkeypatch, panel_rows, num_neighbors, dtype):
    monkeypatch.setattr(exact, "PANEL_ROWS", panel_rows)
    features_ND = unit_rows(120 if panel_rows > 1 else 40)  # panels of one row are many
    num_neighbors = min(num_neighbors, len(features_ND))
    expected_NT, order_NT = sorted_lists(features_ND, num_neighbors)
    similarity_TV, neighbor_TV = table(features_ND.to(dtype), num_neighbors)
    assert neighbor_TV.dtype == torch.int32
    assert similarity_TV.dtype == dtype
    np.testing.assert_array_equal(neighbor_TV.T, order_NT)
    np.testing.assert_allclose(similarity_TV.T, expected_NT, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lists_are_whole_where_bounds_are_too_high(monkeypatch, dtype):
    """The twelve samples that give the bounds are alike: for each of them, nearly all others are below its bound."""
    monkeypatch.setattr(exact, "MAX_UNBOUNDED", 0)
    monkeypatch.setattr(exact, "MIN_SEEDS", 12)
    monkeypatch.setattr(exact, "PANEL_ROWS", 50)
    features_ND = unit_rows(120)
    features_ND[::10] = torch.nn.functional.normalize(features_ND[:1] + 0.01 * features_ND[::10])
    _, order_NT = sorted_lists(features_ND, 20)
    similarity_TV, neighbor_TV = table(features_ND.to(dtype), 20)
    np.testing.assert_array_equal(neighbor_TV.T, order_NT)
    assert bool((similarity_TV[-1] > 0.0).all())


@pytest.mark.parametrize("num_neighbors", [5, 60])
def test_lists_that_fill_up_many_times_lose_nothing(monkeypatch, num_neighbors):
    """All of a row's 1,500 candidates come in order of rising similarity: each tile is better than those before."""
    monkeypatch.setattr(exact, "MAX_UNBOUNDED", 0)
    monkeypatch.setattr(exact, "PANEL_ROWS", 250)
    angle_N = torch.linspace(0.0, 1.5, 1500, dtype=torch.float64)
    features_ND = torch.stack([angle_N.cos(), angle_N.sin()], dim=1)
    _, order_NT = sorted_lists(features_ND, num_neighbors)
    _, neighbor_TV = table(features_ND, num_neighbors)
    # neighbours to the left and to the right are equally far: compare how far
    found_NT = (neighbor_TV.T.long() - torch.arange(1500)[:, None]).abs().sort(1).values
    np.testing.assert_array_equal(found_NT, np.sort(np.abs(order_NT - np.arange(1500)[:, None]), axis=1))


@pytest.mark.parametrize("share", [(0, 0), (0, 1), (1, 2), (2, 5), (0, 5)])
@pytest.mark.usefixtures("bounds")
def test_a_rank_finds_the_same_bits_for_its_own_rows(monkeypatch, share):
    monkeypatch.setattr(exact, "PANEL_ROWS", 30)
    features_ND, edges = unit_rows(200, 33, dtype=torch.float32), [0, 13, 14, 90, 140, 200]
    similarity_TV, neighbor_TV = table(features_ND, 6, edges=edges[:-1])
    rows = range(edges[share[0]], edges[share[1]])
    own_similarity_TV, own_neighbor_TV = table(features_ND, 6, rows, edges[:-1])
    assert torch.equal(own_neighbor_TV, neighbor_TV[:, rows.start : rows.stop])
    assert torch.equal(own_similarity_TV, similarity_TV[:, rows.start : rows.stop])


@pytest.mark.usefixtures("bounds")
def test_any_number_of_threads_gives_the_bits_of_one(monkeypatch):
    monkeypatch.setattr(exact, "PANEL_ROWS", 100)
    features_ND = unit_rows(900, 33, dtype=torch.float32)
    expected = table(features_ND, 20)
    torch.set_num_threads(3)
    try:
        found = table(features_ND, 20)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_an_error_in_a_task_is_raised(monkeypatch):
    def features(rows):
        if isinstance(rows, slice) and rows.start > 0:
            raise OSError("the disk is gone")
        return torch.eye(4)[rows]

    torch.set_num_threads(2)
    try:
        with pytest.raises(OSError, match="the disk is gone"):
            nearest_neighbors(features, [slice(0, 2), slice(2, 4)], range(4), num_neighbors=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_slices_only_panels_are_read_or_nothing(monkeypatch, dtype):
    """A source that reads samples where they are needed knows no open slices, and none that end before they begin."""
    monkeypatch.setattr(exact, "PANEL_ROWS", 30)
    features_ND = unit_rows(100, dtype=dtype)
    panels = [(0, 25), (25, 50), (50, 75), (75, 100)]

    def features(rows):
        if isinstance(rows, slice):
            assert (rows.start, rows.stop, rows.step) in [(0, 0, None), *((*panel, None) for panel in panels)]
        else:
            assert rows.dtype == torch.int64
            assert all(0 <= row < 100 for row in rows.tolist())
        return features_ND[rows]

    _, neighbor_TV = nearest_neighbors(features, [slice(0, 50), slice(50, 100)], range(100), num_neighbors=3)
    np.testing.assert_array_equal(neighbor_TV.T, sorted_lists(features_ND.double(), 3)[1])


def test_no_rows_have_no_lists():
    similarity_TV, neighbor_TV = table(unit_rows(5), 3, range(2, 2))
    assert similarity_TV.shape == neighbor_TV.shape == (3, 0)
    assert neighbor_TV.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_neighbors", only(1, 30, of=[1, 4, 30]))
@pytest.mark.parametrize("panel_rows", only(8, 2048, of=[3, 8, 2048]))
@pytest.mark.usefixtures("bounds")
def test_with_copies_each_sample_is_first_in_its_own_list_and_no_list_repeats(
    monkeypatch, dtype, num_neighbors, panel_rows
):
    """apricot #19: redundant rows give repeated indices."""
    monkeypatch.setattr(exact, "PANEL_ROWS", panel_rows)
    # 130 samples, 5 of them different, with norms that round to either side of 1
    features_ND = unit_rows(5, 7, dtype=dtype)[torch.arange(130) % 5]
    similarity_TV, neighbor_TV = table(features_ND, num_neighbors)
    assert neighbor_TV[0].tolist() == list(range(130))
    assert all(len(set(list_T)) == num_neighbors for list_T in neighbor_TV.T.tolist())
    assert bool((similarity_TV.diff(dim=0) <= 0).all())
    # the copies come before all others
    num_copies = min(num_neighbors, 26)
    assert bool((neighbor_TV[:num_copies] % 5 == torch.arange(130) % 5).all())


def test_samples_of_equal_similarity_come_in_row_order(monkeypatch):
    monkeypatch.setattr(exact, "MAX_UNBOUNDED", 0)
    monkeypatch.setattr(exact, "PANEL_ROWS", 7)
    features_ND = torch.eye(4)[torch.arange(400) % 4]
    _, neighbor_TV = table(features_ND, 10)
    for row, list_T in enumerate(neighbor_TV.T.tolist()):
        assert list_T == [row, *[other for other in range(row % 4, 400, 4) if other != row][:9]]


def test_opposite_samples_are_no_neighbours():
    features_ND = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    similarity_TV, neighbor_TV = table(features_ND, 2)
    assert similarity_TV.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert neighbor_TV.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("kind", ["random", "copies", "signs", "half-space", "ordered"])
@pytest.mark.usefixtures("bounds")
def test_lists_have_the_same_bits_whether_quick_products_are_of_bfloat16_or_not(monkeypatch, kind):
    monkeypatch.setattr(exact, "PANEL_ROWS", 130)
    features_ND = unit_rows(400, 40, dtype=torch.float32)
    if kind == "copies":
        features_ND = features_ND[torch.arange(400) % 90]
    elif kind == "signs":
        features_ND = features_ND.sign() / 40**0.5
    elif kind == "half-space":  # hardly a pair has a positive cosine
        features_ND = torch.eye(400)[:, :399] - 1 / 399
        features_ND = torch.nn.functional.normalize(features_ND)
    elif kind == "ordered":
        angle_N = torch.linspace(0.0, 1.5, 400)
        features_ND = torch.stack([angle_N.cos(), angle_N.sin()], dim=1)
    found = []
    for is_quick in (True, False):
        monkeypatch.setattr(pairs, "multiplies_bfloat16", lambda device, answer=is_quick: answer)
        found.append(table(features_ND, 12))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# ---- the parts of a search -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3, 4, 100])
def test_slices_are_cut_into_as_few_equal_parts_as_can_be(num_rows):
    slices = [slice(3, 3), slice(3, 12), slice(12, 13), slice(13, 20)]
    parts_of = [split_panels([rows], num_rows) for rows in slices]
    assert split_panels(slices, num_rows) == list(itertools.chain(*parts_of))
    for rows, parts in zip(slices, parts_of, strict=True):
        lengths = [part.stop - part.start for part in parts]
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows.start, rows.stop))
        assert len(parts) == max(1, -(-(rows.stop - rows.start) // num_rows))
        assert max(lengths) - min(lengths) <= 1


def poisson_tail(mean, least):
    """Probability that a Poisson number is at least that."""
    return 1.0 - sum(math.exp(-mean + number * math.log(mean) - math.lgamma(number + 1)) for number in range(least))


@pytest.mark.parametrize("num_samples", [5000, 6143, 50_000, 1_000_003])
@pytest.mark.parametrize("num_neighbors", [1, 4, 30, 200])
def test_seeds_are_at_equal_distances_and_their_bound_is_too_high_for_less_than_one_row_in_a_thousand(
    num_samples, num_neighbors
):
    seeds = Seeds.choose(
        lambda rows: torch.arange(num_samples, dtype=torch.float64)[rows, None], num_samples, num_neighbors
    )
    distance_S = seeds.features_SD.squeeze(1).diff()
    num_seeds = len(seeds.features_SD)
    assert num_seeds == min(4096, max(512, num_samples // 12))
    assert float(distance_S.max() - distance_S.min()) <= 1.0
    assert seeds.features_SD[0] == 0
    assert num_samples - seeds.features_SD[-1] <= distance_S.max()
    mean = num_neighbors * num_seeds / num_samples
    assert poisson_tail(mean, seeds.rank) < 1e-3
    # a bound that is as good as safe lets through what is no neighbour
    assert poisson_tail(mean, seeds.rank - 2 - math.ceil(math.sqrt(mean))) > 1e-3


def test_of_few_samples_all_are_seeds():
    seeds = Seeds.choose(lambda rows: torch.arange(100.0)[rows, None], 100, 90)
    assert seeds.features_SD.squeeze(1).tolist() == list(range(100))
    assert seeds.rank == 100


@pytest.mark.parametrize("num_neighbors", [1, 5, 150])
@pytest.mark.parametrize("num_offered", [1, 40, 400])
def test_a_list_is_the_best_of_what_it_was_offered_in_any_order(num_neighbors, num_offered):
    rng = np.random.default_rng(num_offered)
    rows, bounds = [7, 0, 300], [-2.0, 0.125, 0.5]
    lists = GrowingLists(torch.tensor(bounds), torch.tensor(rows), num_neighbors)
    taken = [[(math.inf, row)] for row in rows]
    others = rng.permutation(np.setdiff1d(np.arange(3000), rows))
    for offer in range(5):
        others_of_offer = others[offer * num_offered : (offer + 1) * num_offered]
        pairs = [(place, other) for place, row in enumerate(rows) for other in (*others_of_offer, row)]
        pairs = rng.permutation(pairs) if offer % 2 else np.array(pairs)
        similarity_E = rng.integers(-4, 9, size=len(pairs)) / 8  # some are equal, some at a bound
        for (place, other), similarity in zip(pairs.tolist(), similarity_E.tolist(), strict=True):
            if similarity >= bounds[place] and other != rows[place]:
                taken[place].append((similarity, other))
        lists.offer(*torch.tensor(pairs).T, torch.tensor(similarity_E).float(), is_ordered=offer % 2 == 0)
    keys_PT, is_full_P = lists.best()
    for keys_T, is_full, entries in zip(keys_PT, is_full_P.tolist(), taken, strict=True):
        found_T = keys_T[keys_T != EMPTY_KEY]
        best = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[:num_neighbors]
        assert list(zip(similarity_of(found_T).tolist(), index_of(found_T).tolist(), strict=True)) == best
        assert is_full is (len(entries) >= num_neighbors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_neighbors", [1, 4, 18, 19, 25])
@pytest.mark.parametrize("num_products", [1, 50, 2**22])
def test_lists_among_some_samples_are_those_of_sorting_and_end_with_the_sample(
    monkeypatch, num_products, num_neighbors, dtype
):
    monkeypatch.setattr(exact, "UNBOUNDED_PRODUCTS", num_products)
    features_ND = unit_rows(60, dtype=dtype)
    others = [slice(10, 25), torch.tensor([58, 3, 40]), slice(30, 30)]
    rows_P = torch.tensor([12, 59, 3])  # one of them is not among the others
    pairs = SimilarPairs.among(features_ND.__getitem__, [slice(0, 60)])
    keys_PT = search_all(pairs, features_ND.__getitem__, others, rows_P, num_neighbors)
    similarity_PT, neighbor_PT = finished_lists(features_ND.__getitem__, rows_P, keys_PT)
    assert (similarity_PT.dtype, neighbor_PT.dtype) == (dtype, torch.int64)
    cosine_NN = features_ND.double() @ features_ND.double().T
    for row, similarity_T, neighbor_T in zip(rows_P.tolist(), similarity_PT, neighbor_PT.tolist(), strict=True):
        ranked = sorted({*range(10, 25), 58, 3, 40} - {row}, key=(-cosine_NN[row]).tolist().__getitem__)
        expected = [row, *ranked][:num_neighbors]
        padding = num_neighbors - len(expected)
        assert neighbor_T == expected + [row] * padding
        expected_T = [*cosine_NN[row, expected].clamp(min=0.0).tolist(), *[0.0] * padding]
        np.testing.assert_allclose(similarity_T, expected_T, atol=1e-14 if dtype == torch.float64 else 1e-6)


def test_samples_that_float32_cannot_tell_apart_are_ranked_in_float64():
    angle_N = torch.tensor([0.0, 0.3, 0.3 - 1e-10, 0.3 - 2e-10], dtype=torch.float64)
    features_ND = torch.stack([angle_N.cos(), angle_N.sin()], dim=1)
    similarity_TV, neighbor_TV = table(features_ND, 4)
    assert neighbor_TV[:, 0].tolist() == [0, 3, 2, 1]
    assert torch.equal(similarity_TV[:, 0], angle_N.cos()[[0, 3, 2, 1]])
    _, neighbor_TV = table(features_ND.float(), 4)
    assert neighbor_TV[:, 0].tolist() == [0, 1, 2, 3]
