import pytest
import torch

from datamask_pl.functional.kernels import kth_largest, multiply_bfloat16, pair_products, positions_from
from datamask_pl.functional.neighbors import pairs as module
from datamask_pl.functional.neighbors.pairs import SimilarPairs


def rows_of_kind(kind, num_samples, num_features=64):
    """Unit rows; all elements of `halfway` but one lie between two numbers of bfloat16, and round the same way."""
    source = torch.Generator().manual_seed(len(kind))
    rows_ND = torch.randn(num_samples, num_features, generator=source)
    if kind == "bunch":
        rows_ND = 1 + 0.05 * rows_ND
    elif kind == "signs":
        rows_ND = rows_ND.sign()
    elif kind == "copies":
        rows_ND = rows_ND[:1].repeat(num_samples, 1)
    elif kind == "halfway":
        rows_ND = rows_ND.sign() * (1 + 2**-8 - 2**-12)
        rows_ND[:, 0] = 0.0
        length = rows_ND.norm(dim=1, keepdim=True)
        rows_ND[:, 0] = (2 ** length.log2().ceil()).square().sub(length.square()).sqrt().squeeze(1)
        return rows_ND / 2 ** length.log2().ceil()
    elif kind == "sparse":
        rows_ND *= torch.rand(num_samples, num_features, generator=source) < 0.1
    return torch.nn.functional.normalize(rows_ND)


def pairs_among(monkeypatch, rows_ND, *, is_quick):
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: is_quick)
    return SimilarPairs.among(lambda rows: rows_ND[rows], [slice(0, 10), slice(10, len(rows_ND))])


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("kind", ["random", "bunch", "signs", "halfway", "sparse"])
def test_no_pair_that_is_similar_enough_is_lost(monkeypatch, kind, is_quick):
    rows_ND = rows_of_kind(kind, 400)
    pairs = pairs_among(monkeypatch, rows_ND, is_quick=is_quick)
    assert pairs.is_quick is is_quick
    left_PD, right_CD = rows_ND[:150], rows_ND[100:]
    similarity_PC = left_PD.double() @ right_CD.double().T
    # of each row the similarity to some sample: as near the bound as can be
    bound_P = similarity_PC.sort(dim=1).values[torch.arange(150), torch.arange(150) * 2]
    bound_C = similarity_PC.sort(dim=0).values[-3]
    for low_P, low_C in [(bound_P, None), (None, bound_C), (bound_P, bound_C)]:
        both = [None if low is None else low.float() for low in (low_P, low_C)]
        row_E, column_E, similarity_E = pairs.at_least(left_PD, right_CD, *both)
        found = set(zip(row_E.tolist(), column_E.tolist(), strict=True))
        is_wanted_PC = torch.zeros_like(similarity_PC, dtype=torch.bool)
        for low in [low_P[:, None]] if low_P is not None else []:
            is_wanted_PC |= similarity_PC >= low
        for low in [low_C] if low_C is not None else []:
            is_wanted_PC |= similarity_PC >= low
        assert len(found) == len(row_E)
        assert found >= set(map(tuple, is_wanted_PC.nonzero().tolist()))
        torch.testing.assert_close(similarity_E.double(), similarity_PC[row_E, column_E], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["random", "bunch", "signs", "halfway", "sparse"])
def test_the_slack_is_above_what_rounding_does_and_not_far_above(monkeypatch, kind):
    rows_ND = rows_of_kind(kind, 300)
    pairs = pairs_among(monkeypatch, rows_ND, is_quick=True)
    rounded_ND = rows_ND.bfloat16().double()
    error = (rounded_ND @ rounded_ND.T - rows_ND.double() @ rows_ND.double().T).abs().max()
    assert error < pairs.slack < 2**-6.9
    if kind == "halfway":  # the worst there is
        assert error > 0.95 * pairs.slack


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("rank", [1, 4, 60])
def test_bounds_are_below_the_largest_similarities_but_hardly(monkeypatch, rank, is_quick):
    rows_ND = rows_of_kind("random", 60)
    pairs = pairs_among(monkeypatch, rows_ND, is_quick=is_quick)
    exact_P = (rows_ND.double() @ rows_ND.double().T).sort(dim=1, descending=True).values[:, rank - 1]
    gap_P = exact_P - pairs.bounds(rows_ND, [rows_ND[:25], rows_ND[25:]], rank)
    assert bool((gap_P >= 0).all())
    assert bool((gap_P <= (0.03 if is_quick else 2 * pairs.slack)).all())


def test_bounds_allow_for_the_rounding_of_results(monkeypatch):
    """Rows of bfloat16 whose similarities need more bits than it has: nothing but the results is rounded."""
    signs_ND = torch.ones(1024, 1024)
    signs_ND[torch.ones(1024, 1024).tril().bool()] = -1.0  # row n differs from a row of ones in n + 1 places
    rows_ND = torch.cat([torch.ones(1, 1024), signs_ND[200:260]]) / 32
    pairs = pairs_among(monkeypatch, rows_ND, is_quick=True)
    gaps = [
        float(rows_ND[0] @ rows_ND[other] - pairs.bounds(rows_ND[:1], [rows_ND[other : other + 1]], 1))
        for other in range(1, 61)
    ]
    assert min(gaps) >= 0
    assert min(gaps) < 2**-9, "nothing was rounded up: the test shows nothing"


@pytest.mark.parametrize("is_quick", [True, False])
def test_of_samples_the_parts_are_read_or_nothing(monkeypatch, is_quick):
    """A source that reads samples where they are needed knows no open slices, and none that end before they begin."""
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: is_quick)
    rows_ND, parts = rows_of_kind("random", 30), [slice(0, 12), slice(12, 30)]

    def features(rows):
        assert rows in [slice(0, 0), *parts]
        return rows_ND[rows]

    assert SimilarPairs.among(features, parts).is_quick is is_quick


def test_parts_may_be_empty(monkeypatch):
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: True)
    rows_ND = rows_of_kind("random", 30)
    parts = [slice(0, 0), slice(0, 30), slice(30, 30)]
    whole = SimilarPairs.among(lambda rows: rows_ND[rows], [slice(0, 30)])
    assert SimilarPairs.among(lambda rows: rows_ND[rows], parts) == whole


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("kind", ["random", "bunch", "signs", "halfway", "sparse", "copies"])
def test_the_highest_is_that_of_all_pairs_in_the_bits_of_a_pair(monkeypatch, kind, is_quick):
    rows_ND = rows_of_kind(kind, 300)
    pairs = pairs_among(monkeypatch, rows_ND, is_quick=is_quick)
    own_PD, other_CD = rows_ND[:90], rows_ND[90:]
    row_E, column_E = torch.ones(90, 210).nonzero().T
    expected_P = pair_products(own_PD, other_CD, row_E, column_E).view(90, 210).amax(1).clamp(min=0.0)
    for num_rows in (1, 7, 64, 150, 210):
        assert torch.equal(pairs.highest(own_PD, other_CD.split(num_rows)), expected_P)
        assert torch.equal(pairs.highest(own_PD[5:8], other_CD.flip(0).split(num_rows)), expected_P[5:8])


def test_the_highest_is_found_where_rounding_hides_by_how_little_it_is_higher(monkeypatch):
    """Quick products err here by nearly all that they can: the best pair's is below the similarity of another pair."""
    monkeypatch.setattr(module, "FEW_PAIRS", 0)
    own_PD = rows_of_kind("halfway", 30)[:1]
    flipped_CD = own_PD.repeat(30, 1)
    for num_flipped, row_D in enumerate(flipped_CD):
        row_D[1 : 1 + num_flipped] *= -1
    pairs = pairs_among(monkeypatch, torch.cat([own_PD, flipped_CD]), is_quick=True)
    column_C = torch.arange(30)
    expected_C = pair_products(own_PD, flipped_CD, torch.zeros_like(column_C), column_C)
    assert bool((multiply_bfloat16(own_PD, flipped_CD)[0] < expected_C - 0.5 * pairs.slack).any())
    for best_CD, expected in zip(flipped_CD[:, None], expected_C, strict=True):
        for share in (1e-6, 1e-4, 5e-4, 1e-3):
            found_P = pairs.highest(own_PD, [best_CD * (1 - share), best_CD])
            assert torch.equal(found_P, expected[None].clamp(min=0.0))


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_highest_is_0_where_all_are_below(monkeypatch, is_quick):
    rows_ND = rows_of_kind("bunch", 40)
    pairs = pairs_among(monkeypatch, torch.cat([rows_ND, -rows_ND]), is_quick=is_quick)
    assert pairs.highest(rows_ND, [-rows_ND]).tolist() == [0.0] * 40


def test_the_highest_of_float64_is_found_in_float64():
    rows_ND = torch.nn.functional.normalize(rows_of_kind("random", 100).double())
    pairs = SimilarPairs.among(lambda rows: rows_ND[rows], [slice(0, 100)])
    expected_P = (rows_ND[:30] @ rows_ND[30:].T).amax(1).clamp(min=0.0)
    torch.testing.assert_close(pairs.highest(rows_ND[:30], rows_ND[30:].split(9)), expected_P, atol=1e-14, rtol=0)


def test_a_pair_has_the_same_bits_in_any_company():
    rows_ND = rows_of_kind("random", 500, 384)
    row_E, column_E = torch.ones(500, 500).nonzero().T
    products_NN = pair_products(rows_ND, rows_ND, row_E, column_E).view(500, 500)
    assert torch.equal(products_NN, products_NN.T)
    source = torch.Generator().manual_seed(0)
    row_E, column_E = (torch.randint(size, (70,), generator=source) for size in (100, 30))
    row_E = row_E.sort().values
    part_E = pair_products(rows_ND[50:150], rows_ND[7:37], row_E, column_E)
    assert torch.equal(part_E, products_NN[row_E + 50, column_E + 7])
    torch.set_num_threads(3)
    try:
        assert torch.equal(pair_products(rows_ND, rows_ND, *torch.ones(500, 500).nonzero().T), products_NN.flatten())
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(products_NN.double(), rows_ND.double() @ rows_ND.double().T, atol=1e-6, rtol=0)


def test_no_pairs_have_no_products():
    empty_E = torch.zeros(0, dtype=torch.int64)
    assert pair_products(torch.ones(3, 2), torch.ones(4, 2), empty_E, empty_E).shape == (0,)
    assert pair_products(torch.ones(0, 2), torch.ones(4, 2), empty_E, empty_E).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 0.7])
def test_positions_and_ranks_are_those_of_comparing_and_sorting(dtype, shift):
    values_RC = (torch.rand(13, 21, generator=torch.Generator().manual_seed(1)) + shift).to(dtype)
    values_RC[0, :3] = torch.tensor([0.0, -0.0, -1.0]).to(dtype)
    for rank in (1, 9, 21):
        assert torch.equal(kth_largest(values_RC, rank), values_RC.sort(dim=1, descending=True).values[:, rank - 1])
    bound_R, bound_C = values_RC[:, 4], values_RC[5]
    for low_R, low_C in [(bound_R, None), (None, bound_C), (bound_R, bound_C)]:
        is_wanted_RC = torch.zeros(13, 21, dtype=torch.bool)
        is_wanted_RC |= values_RC >= low_R[:, None] if low_R is not None else False
        is_wanted_RC |= values_RC >= low_C if low_C is not None else False
        assert torch.equal(positions_from(values_RC, low_R, low_C), is_wanted_RC.flatten().nonzero().squeeze(1))


def test_products_of_bfloat16_are_added_in_more_than_bfloat16():
    ones_PD = torch.ones(4, 4096, dtype=torch.bfloat16)
    assert bool((multiply_bfloat16(ones_PD, ones_PD) == 4096).all())


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("num_own", [0, 3, 200])
def test_a_part_without_samples_changes_no_highest_similarity(monkeypatch, num_own, is_quick):
    rows_ND = rows_of_kind("random", 400)
    pairs = pairs_among(monkeypatch, rows_ND, is_quick=is_quick)
    own_PD, others = rows_ND[:num_own], [rows_ND[200:203], rows_ND[203:]]
    expected_P = pairs.highest(own_PD, others)
    assert expected_P.shape == (num_own,)
    nothing = rows_ND[:0]
    assert pairs.highest(own_PD, [nothing, others[0], nothing, others[1], nothing]).equal(expected_P)
    assert pairs.highest(own_PD, [nothing]).equal(torch.zeros(num_own))
