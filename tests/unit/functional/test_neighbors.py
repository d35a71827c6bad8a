import numpy as np
import pytest
import torch

from datamask_pl.functional import neighbors
from datamask_pl.functional.neighbors import nearest_neighbors


def unit_rows(num_samples, num_features=5, seed=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_samples, num_features, generator=source, dtype=dtype))


def table(features_ND, num_neighbors, rows=None):
    rows = range(len(features_ND)) if rows is None else rows
    return nearest_neighbors(lambda some: features_ND[some], len(features_ND), rows, num_neighbors=num_neighbors)


@pytest.mark.parametrize(
    ("query_rows", "key_rows"), [(4096, 8192), (1, 1), (3, 7), (7, 3), (50, 10), (10, 50), (49, 51)]
)
@pytest.mark.parametrize("num_neighbors", [1, 2, 7, 50])
def test_lists_are_those_of_a_full_sort_whatever_the_blocks(monkeypatch, query_rows, key_rows, num_neighbors):
    monkeypatch.setattr(neighbors, "QUERY_ROWS", query_rows)
    monkeypatch.setattr(neighbors, "KEY_ROWS", key_rows)
    features_ND = unit_rows(50)
    cosine_NN = (features_ND @ features_ND.T).numpy()
    order_NT = np.argsort(-cosine_NN, axis=1)[:, :num_neighbors]
    similarity_TV, neighbor_TV = table(features_ND, num_neighbors)
    assert neighbor_TV.dtype == torch.int32
    np.testing.assert_array_equal(neighbor_TV.T, order_NT)
    expected_NT = np.maximum(0.0, np.take_along_axis(cosine_NN, order_NT, axis=1))
    np.testing.assert_allclose(similarity_TV.T, expected_NT, atol=1e-12)


@pytest.mark.parametrize("rows", [range(0, 13), range(13, 14), range(14, 50)])
def test_a_rank_finds_the_lists_of_its_own_rows(monkeypatch, rows):
    monkeypatch.setattr(neighbors, "QUERY_ROWS", 8)
    monkeypatch.setattr(neighbors, "KEY_ROWS", 16)
    features_ND = unit_rows(50)
    similarity_TV, neighbor_TV = table(features_ND, 6)
    own_similarity_TV, own_neighbor_TV = table(features_ND, 6, rows)
    assert torch.equal(own_neighbor_TV, neighbor_TV[:, rows.start : rows.stop])
    torch.testing.assert_close(own_similarity_TV, similarity_TV[:, rows.start : rows.stop])


def test_no_rows_have_no_lists():
    similarity_TV, neighbor_TV = table(unit_rows(5), 3, range(2, 2))
    assert similarity_TV.shape == neighbor_TV.shape == (3, 0)
    assert neighbor_TV.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_neighbors", [1, 4, 30])
@pytest.mark.parametrize("key_rows", [3, 8, 8192])
def test_with_copies_each_sample_is_first_in_its_own_list_and_no_list_repeats(
    monkeypatch, dtype, num_neighbors, key_rows
):
    """apricot #19: redundant rows give repeated indices."""
    monkeypatch.setattr(neighbors, "QUERY_ROWS", 4)
    monkeypatch.setattr(neighbors, "KEY_ROWS", key_rows)
    # 30 samples, 5 of them different, with norms that round to either side of 1
    features_ND = unit_rows(5, 7, dtype=dtype)[torch.arange(30) % 5]
    similarity_TV, neighbor_TV = table(features_ND, num_neighbors)
    assert neighbor_TV[0].tolist() == list(range(30))
    assert all(len(set(list_T)) == num_neighbors for list_T in neighbor_TV.T.tolist())
    assert bool((similarity_TV.diff(dim=0) <= 0).all())
    # the copies come before all others
    num_copies = min(num_neighbors, 6)
    assert bool((neighbor_TV[:num_copies] % 5 == torch.arange(30) % 5).all())


def test_opposite_samples_are_no_neighbours():
    features_ND = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    similarity_TV, neighbor_TV = table(features_ND, 2)
    assert similarity_TV.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert neighbor_TV.tolist() == [[0, 1], [1, 0]]
