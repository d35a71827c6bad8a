import numpy as np
import pytest
import torch

from datamask_pl.functional.neighbors import exact, inverted_file, pairs
from datamask_pl.functional.neighbors.exact import nearest_neighbors
from datamask_pl.functional.neighbors.inverted_file import build_inverted_file, cluster_centers, nearest_by_cluster
from datamask_pl.functional.neighbors.kmeans import nearest_center


def clustered_rows(num_samples, dtype=torch.float32):
    """Twelve bunches of samples in eight dimensions."""
    source = torch.Generator().manual_seed(0)
    centers = torch.randn(12, 8, generator=source, dtype=dtype)
    noise = torch.randn(num_samples, 8, generator=source, dtype=dtype)
    return torch.nn.functional.normalize(centers[torch.arange(num_samples) % 12] + 0.5 * noise)


@pytest.fixture(autouse=True)
def small_clusters(monkeypatch):
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 25)


def inverted(features_ND, num_neighbors, wanted_recall):
    def features(rows):
        return features_ND[rows]

    centers_CD = cluster_centers(features, len(features_ND))
    label_N = nearest_center(features_ND, centers_CD)
    return features, build_inverted_file(
        features, centers_CD, label_N, num_neighbors=num_neighbors, wanted_recall=wanted_recall
    )


def lists(features, file, num_neighbors, own=None):
    """Lists by row."""
    own = own or slice(0, len(file.order_N))
    found = {}
    for part, similarity_PT, neighbor_PT in nearest_by_cluster(features, file, own, num_neighbors=num_neighbors):
        for row, *both in zip(file.order_N[part].tolist(), similarity_PT, neighbor_PT, strict=True):
            assert row not in found
            found[row] = both
    return found


def k_means(rows_ND, num_clusters, rng_rows):
    """Spherical k-means of some rows, one after the other; a cluster without members stays."""
    centers = [rows_ND[row] for row in rng_rows[:num_clusters]]
    for _ in range(inverted_file.NUM_ITERATIONS):
        sums = [np.zeros(rows_ND.shape[1]) for _ in centers]
        for row in rng_rows:
            sums[int(np.argmax([center @ rows_ND[row] for center in centers]))] += rows_ND[row]
        centers = [
            total / np.linalg.norm(total) if total.any() else center
            for total, center in zip(sums, centers, strict=True)
        ]
    return centers


@pytest.mark.parametrize("kind", ["bunches", "one", "copies", "opposite"])
def test_centers_are_those_of_spherical_k_means_and_of_length_one(monkeypatch, kind):
    monkeypatch.setattr(inverted_file, "SAMPLES_PER_CLUSTER", 7)
    rows_ND = clustered_rows(20 if kind == "one" else 240, torch.float64)
    if kind == "copies":  # of five clusters four have no members
        rows_ND = rows_ND[:1].repeat(110, 1)
    elif kind == "opposite":
        rows_ND = torch.tensor([[1.0, 0.0], [-0.9, 0.19**0.5]], dtype=torch.float64)
    num_clusters = -(-len(rows_ND) // 25)
    order = torch.randperm(len(rows_ND), generator=torch.Generator().manual_seed(inverted_file.SEED)).tolist()
    expected_CD = k_means(rows_ND.numpy(), num_clusters, order[: 7 * num_clusters])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    centers_CD = cluster_centers(lambda rows: rows_ND[rows], len(rows_ND))
    np.testing.assert_allclose(centers_CD, expected_CD, atol=1e-9)
    np.testing.assert_allclose(centers_CD.norm(dim=1), 1.0, rtol=1e-9)
    assert torch.equal(torch.get_rng_state(), before)


def test_clusters_are_the_rows_of_each_label_in_order_also_where_there_are_none():
    features_ND = clustered_rows(60)
    label_N = torch.arange(60) % 3
    label_N[label_N == 1] = 2
    file = build_inverted_file(
        lambda rows: features_ND[rows], features_ND[:5], label_N, num_neighbors=3, wanted_recall=0.9
    )
    assert [file.order_N[part].tolist() for part in file.clusters] == [
        [row for row in range(60) if label_N[row] == cluster] for cluster in range(5)
    ]


@pytest.mark.parametrize("num_neighbors", [4, 25])
@pytest.mark.parametrize(("num_choosers", "num_judges"), [(60, 10), (61, 10), (40, 20), (40, 10)])
def test_as_many_clusters_are_looked_at_as_the_choosers_need_and_the_judges_say_what_they_find(
    monkeypatch, num_choosers, num_judges, num_neighbors
):
    """The twelve samples that give the bounds are alike: theirs are too high for lists of 25."""
    monkeypatch.setattr(exact, "MIN_SEEDS", 12)
    monkeypatch.setattr(inverted_file, "NUM_CHOOSERS", num_choosers)
    monkeypatch.setattr(inverted_file, "NUM_JUDGES", num_judges)
    monkeypatch.setattr(inverted_file, "QUERY_ROWS", 16)
    rows_ND = clustered_rows(60, torch.float64)
    rows_ND[::5] = torch.nn.functional.normalize(rows_ND[:1] + 0.01 * rows_ND[::5])
    centers_CD = clustered_rows(12, torch.float64)
    label_N = nearest_center(rows_ND, centers_CD)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    file = build_inverted_file(
        lambda rows: rows_ND[rows], centers_CD, label_N, num_neighbors=num_neighbors, wanted_recall=0.8
    )
    assert torch.equal(torch.get_rng_state(), before)
    # the clusters from the nearest to the farthest, itself first
    nearness_CC = (centers_CD @ centers_CD.T).numpy()
    np.fill_diagonal(nearness_CC, 2.0)
    nearest = [np.argsort(-nearness_C, kind="stable").tolist() for nearness_C in nearness_CC]
    num_looked_at = file.looked_at_CM.shape[1]
    assert file.looked_at_CM.tolist() == [order[:num_looked_at] for order in nearest]
    cosine_NN = (rows_ND @ rows_ND.T).numpy()
    np.fill_diagonal(cosine_NN, 2.0)
    places = [
        [nearest[label_N[row]].index(label_N[other]) for other in np.argsort(-cosine_NN[row])[:num_neighbors]]
        for row in torch.randperm(60, generator=torch.Generator().manual_seed(inverted_file.SEED + 1)).tolist()
    ]
    assert num_looked_at == needed(places[:num_choosers], 12, 0.8)
    judges = places[num_choosers : num_choosers + num_judges] or places[:60]
    found = [place < num_looked_at for judge in judges for place in judge]
    assert file.recall == pytest.approx(np.mean(found), abs=1e-12)
    assert 0.5 < file.recall < 1.0


def needed(places, num_clusters, wanted_recall):
    """The least number of clusters whose recall is above what is wanted by two standard errors."""
    for number in range(1, num_clusters + 1):
        recalls = [sum(place < number for place in query) / len(query) for query in places]
        if np.mean(recalls) - 2 * np.std(recalls) / len(recalls) ** 0.5 >= wanted_recall:
            return number
    return num_clusters


def test_the_number_of_clusters_is_the_least_that_is_enough_with_two_standard_errors():
    rng = np.random.default_rng(0)
    places = rng.integers(0, 9, size=(15, 4)).tolist()
    for wanted_recall in np.linspace(0.05, 1.0, 400).tolist():
        found = inverted_file._num_needed(torch.tensor(places), 9, wanted_recall)
        assert found == needed(places, 9, wanted_recall), wanted_recall


def test_a_search_of_all_clusters_is_exact():
    features_ND = clustered_rows(600)
    features, file = inverted(features_ND, 9, 1.0)
    similarity_TV, neighbor_TV = nearest_neighbors(features, [slice(0, 600)], range(600), num_neighbors=9)
    all_file = inverted_file.InvertedFile(
        file.order_N, file.clusters, torch.arange(len(file.clusters)).repeat(len(file.clusters), 1), 1.0
    )
    found = lists(features, all_file, 9)
    for row in range(600):
        assert found[row][1].tolist() == neighbor_TV[:, row].tolist()
        torch.testing.assert_close(found[row][0], similarity_TV[:, row])


@pytest.mark.parametrize("wanted_recall", [0.5, 0.8, 0.95, 1.0])
def test_recall_is_what_was_wanted_and_what_is_said(monkeypatch, wanted_recall):
    """All samples are queries here: what is said of half of them is nearly what is true of all."""
    monkeypatch.setattr(inverted_file, "NUM_CHOOSERS", 500)
    monkeypatch.setattr(inverted_file, "NUM_JUDGES", 500)
    features_ND = clustered_rows(1000)
    features, file = inverted(features_ND, 10, wanted_recall)
    _, neighbor_TV = nearest_neighbors(features, [slice(0, 1000)], range(1000), num_neighbors=10)
    found = lists(features, file, 10)
    hits = sum(len(set(found[row][1].tolist()) & set(neighbor_TV[:, row].tolist())) for row in range(1000))
    assert hits / 10_000 == pytest.approx(file.recall, abs=0.02)
    assert hits / 10_000 >= min(wanted_recall, 0.99)  # choosers that find all say little of the last hundredth
    assert file.looked_at_CM.shape[1] < len(file.clusters) or wanted_recall == 1.0


def test_lists_are_the_best_of_the_clusters_looked_at_and_begin_with_the_sample():
    features_ND = clustered_rows(500)
    features, file = inverted(features_ND, 12, 0.7)
    label_N = torch.empty(500, dtype=torch.int64)
    for cluster, members in enumerate(file.clusters):
        label_N[file.order_N[members]] = cluster
    found = lists(features, file, 12)
    assert sorted(found) == list(range(500))
    cosine_NN = features_ND @ features_ND.T
    cosine_NN.fill_diagonal_(2.0)
    for row, (similarity_T, neighbor_T) in found.items():
        looked_at_N = torch.isin(label_N, file.looked_at_CM[label_N[row]])
        best_T = cosine_NN[row].masked_fill(~looked_at_N, -2.0).topk(12)
        assert neighbor_T[0] == row
        assert set(neighbor_T.tolist()) == {row, *best_T.indices[best_T.values > -2.0].tolist()}
        assert bool((similarity_T.diff() <= 0).all())


def test_a_rank_finds_the_same_bits_for_its_own_clusters():
    features_ND = clustered_rows(700)
    features, file = inverted(features_ND, 8, 0.9)
    whole = lists(features, file, 8)
    for first, last in [(0, 3), (3, 20), (5, 5)]:
        own = slice(file.clusters[first].start, file.clusters[last].start)
        for row, both in lists(features, file, 8, own).items():
            assert all(torch.equal(*pair) for pair in zip(both, whole[row], strict=True))


def test_where_fewer_samples_are_looked_at_than_wanted_the_list_ends_with_the_sample_at_similarity_0():
    features_ND = clustered_rows(60)
    features, file = inverted(features_ND, 3, 0.9)
    alone = inverted_file.InvertedFile(file.order_N, file.clusters, torch.arange(len(file.clusters))[:, None], 0.5)
    for row, (similarity_T, neighbor_T) in lists(features, alone, 60).items():
        num_found = int((neighbor_T != row).sum()) + 1
        assert num_found < 60
        assert neighbor_T[num_found:].tolist() == [row] * (60 - num_found)
        assert bool((similarity_T[num_found:] == 0).all())


def test_copies_of_one_sample_make_one_cluster():
    features_ND = torch.ones(100, 4) / 2
    features, file = inverted(features_ND, 5, 0.9)
    found = lists(features, file, 5)
    assert all(found[row][1][0] == row and len(set(found[row][1].tolist())) == 5 for row in range(100))


def test_lists_have_the_same_bits_whether_quick_products_are_of_bfloat16_or_not(monkeypatch):
    features_ND = clustered_rows(700)
    found = []
    for is_quick in (True, False):
        monkeypatch.setattr(pairs, "multiplies_bfloat16", lambda device, answer=is_quick: answer)
        features, file = inverted(features_ND, 8, 0.9)
        found.append((file, lists(features, file, 8)))
    (quick_file, quick), (file, slow) = found
    assert torch.equal(quick_file.looked_at_CM, file.looked_at_CM)
    for row, both in slow.items():
        assert all(torch.equal(*pair) for pair in zip(quick[row], both, strict=True))


def test_of_slices_only_panels_are_read_or_nothing(monkeypatch):
    """A source that reads samples where they are needed knows no open slices, and none that end before they begin."""
    monkeypatch.setattr(inverted_file, "PANEL_ROWS", 50)
    monkeypatch.setattr(pairs, "multiplies_bfloat16", lambda device: True)
    features_ND = clustered_rows(200)

    def features(rows):
        if isinstance(rows, slice):
            assert (rows.start, rows.stop, rows.step) in [(0, 0, None), *((n, n + 50, None) for n in (0, 50, 100, 150))]
        else:
            assert rows.dtype in (torch.int32, torch.int64)
            assert all(0 <= row < 200 for row in rows.tolist())
        return features_ND[rows]

    centers_CD = cluster_centers(features, 200)
    label_N = nearest_center(features_ND, centers_CD)
    file = build_inverted_file(features, centers_CD, label_N, num_neighbors=4, wanted_recall=0.9)
    assert sorted(lists(features, file, 4)) == list(range(200))
