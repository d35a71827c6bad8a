import numpy as np
import pytest
import torch

from datamask_pl.functional.neighbors import duplicates
from datamask_pl.functional.neighbors.duplicates import find_duplicates, first_of_duplicates, hash_rows

DTYPES = [torch.float32, torch.float64]


def rows_with_copies(dtype=torch.float64, seed=0):
    """300 rows, of which 90, 40, 32, 31 and 2 are the same; others differ from those by a last bit, or in a sign."""
    rng = np.random.default_rng(seed)
    features_ND = torch.tensor(rng.normal(size=(300, 6))).to(dtype)
    order = torch.tensor(rng.permutation(300))
    for start, count in [(0, 90), (90, 40), (130, 32), (162, 31), (193, 2)]:
        features_ND[order[start : start + count]] = features_ND[order[start]].clone()
    near = features_ND[order[0]].clone()
    near[2] = torch.nextafter(near[2], near[2] + 1)
    features_ND[order[200]], features_ND[order[201]] = near, -near
    return features_ND


def first_by_loops(features_ND, least):
    rows = [tuple(row) for row in features_ND.tolist()]
    return [rows.index(row) if rows.count(row) >= least else number for number, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compared_rows", [7, 4096])
def test_the_first_copy_is_that_of_plain_loops(dtype, compared_rows, monkeypatch):
    monkeypatch.setattr(duplicates, "COMPARED_ROWS", compared_rows)
    features_ND = rows_with_copies(dtype)
    parts = [slice(0, 100), slice(100, 101), slice(101, 300)]
    before_ND = features_ND.clone()
    assert first_of_duplicates(features_ND.__getitem__, parts).tolist() == first_by_loops(features_ND, 32)
    assert torch.equal(features_ND, before_ND)


def test_where_copies_are_few_nothing_is_said_of_them():
    features_ND = rows_with_copies()
    is_few_N = torch.tensor([features_ND.tolist().count(row) < 32 for row in features_ND.tolist()])
    assert first_of_duplicates(features_ND[is_few_N].__getitem__, [slice(0, int(is_few_N.sum()))]) is None


def test_samples_of_one_hash_are_compared(monkeypatch):
    monkeypatch.setattr(duplicates, "hash_rows", lambda features_CD: torch.zeros(len(features_CD), dtype=torch.int64))
    features_ND = rows_with_copies()
    rows = features_ND.tolist()
    features_ND[0] = torch.tensor(max(rows, key=rows.count), dtype=torch.float64)
    first_N = first_of_duplicates(features_ND.__getitem__, [slice(0, 300)])
    # those of the first sample are found, and no other sample is called a copy
    assert first_N.tolist() == [
        0 if row == features_ND[0].tolist() else n for n, row in enumerate(features_ND.tolist())
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hash_depends_on_the_row_alone_and_tells_rows_apart(dtype):
    features_ND = rows_with_copies(dtype)
    hash_N = hash_rows(features_ND)
    assert hash_N.dtype == torch.int64
    assert hash_N.tolist() == [int(hash_rows(row_D[None])[0]) for row_D in features_ND]
    assert len(set(hash_N.tolist())) == len({tuple(row) for row in features_ND.tolist()})
    swapped_ND = features_ND[:, [1, 0, 2, 3, 4, 5]]
    assert not set(hash_rows(swapped_ND).tolist()) & set(hash_N.tolist())


@pytest.mark.parametrize("num_neighbors", [1, 2, 35, 60, 89, 90])
def test_what_is_left_out_is_in_no_list_but_its_own(num_neighbors):
    first_N = torch.tensor(first_by_loops(rows_with_copies(), 32))
    surplus = find_duplicates(first_N, num_neighbors)
    number_of = {n: first_N[:n].tolist().count(int(first)) for n, first in enumerate(first_N)}
    left_out = [n for n in range(300) if number_of[n] >= num_neighbors]
    if not left_out:
        assert surplus is None
        return
    assert surplus.rows_S.tolist() == left_out
    assert surplus.kept_U.tolist() == sorted(set(range(300)) - set(left_out))
    models = surplus.kept_U[surplus.model_S].tolist()
    assert [int(first_N[model]) for model in models] == first_N[surplus.rows_S].tolist()
    assert {number_of[model] for model in models} == {num_neighbors - 1}


@pytest.mark.parametrize("num_features", [1, 7, 8, 9, 33])
def test_samples_that_are_the_same_in_most_features_are_told_apart(num_features):
    generator = torch.Generator().manual_seed(0)
    features_ND = torch.randn(40, num_features, generator=generator).repeat(5, 1)
    features_ND[:120] = features_ND[0].clone()
    # of these each differs from the copies in another feature
    features_ND[torch.arange(num_features), torch.arange(num_features)] += 1.0
    first_N = first_of_duplicates(features_ND.__getitem__, [slice(0, 200)])
    assert first_N.tolist() == first_by_loops(features_ND, 32)
