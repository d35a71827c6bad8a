import math

import numpy as np
import pytest
import torch

from datamask_pl.functional.neighbors.keys import EMPTY_KEY, index_of, largest_keys, make_keys, similarity_of
from tests.support.pretended_accelerator import pretend

SIMILARITIES = [1.0, 0.5, 0.5, 1e-45, 0.0, -1e-45, -0.25, -0.25, -1.0, math.inf, -math.inf, 1e38, -1e38]
ROWS = [3, 2**31 - 1, 0, 7, 8, 9, 1, 5, 2, 4, 6, 10, 11]


def test_keys_order_by_similarity_and_of_equal_ones_the_first_row_is_highest():
    keys = make_keys(torch.tensor(SIMILARITIES), torch.tensor(ROWS))
    assert keys.dtype == torch.int64
    by_key = [ROWS[place] for place in keys.argsort(descending=True).tolist()]
    pairs = sorted(zip(SIMILARITIES, ROWS, strict=True), key=lambda pair: (-pair[0], pair[1]))
    assert by_key == [row for _, row in pairs]
    assert bool((keys > EMPTY_KEY).all())


def test_keys_give_back_similarity_and_row():
    keys = make_keys(torch.tensor(SIMILARITIES), torch.tensor(ROWS))
    assert torch.equal(similarity_of(keys), torch.tensor(SIMILARITIES))
    assert index_of(keys).tolist() == ROWS
    assert bool(similarity_of(torch.tensor([EMPTY_KEY])).isnan())


def test_rows_of_a_transposed_matrix_are_broadcast():
    similarity_PC = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).T
    keys_CP = make_keys(similarity_PC, torch.arange(3))
    assert torch.equal(similarity_of(keys_CP), similarity_PC)
    assert index_of(keys_CP).tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("where", [lambda tensor: tensor, pretend])
@pytest.mark.parametrize("num_largest", [1, 3, 20])
def test_the_largest_keys_are_those_of_sorting(num_largest, where):
    keys_PW = torch.tensor(np.random.default_rng(0).integers(-(2**62), 2**62, size=(5, 20)))
    before_PW = keys_PW.clone()
    expected = [sorted(row, reverse=True)[:num_largest] for row in keys_PW.tolist()]
    assert largest_keys(where(keys_PW), num_largest).tolist() == expected
    assert torch.equal(keys_PW, before_PW)
