from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.functional.exact_sum import round_to_grid


@given(seed=st.integers(0, 2**32 - 1), bound=st.floats(1e-6, 1e12), num_values=st.integers(1, 300))
def test_any_order_and_grouping_gives_the_exact_sum(seed, bound, num_values):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=num_values) * 10.0 ** rng.uniform(-12, 0, size=num_values)
    values = torch.tensor(values * (bound / np.abs(values).sum()) * (1 - 1e-12))
    grid = round_to_grid(values, bound=bound)
    exact = sum((Fraction(value) for value in grid.tolist()), Fraction(0))
    assert Fraction(sum(grid.tolist())) == exact
    shuffled = grid[torch.from_numpy(rng.permutation(num_values))]
    cut = int(rng.integers(0, num_values + 1))
    assert Fraction(float(shuffled[:cut].sum() + shuffled[cut:].sum())) == exact


@given(value=st.floats(-1.0, 1.0), bound=st.floats(1.0, 1e9))
def test_a_value_moves_by_half_a_grid_step_at_most(value, bound):
    rounded = float(round_to_grid(torch.tensor([value], dtype=torch.float64), bound=bound)[0])
    assert abs(rounded - value) <= bound * 2.0**-51


def test_many_values_that_all_round_up_stay_exact():
    """The worst case for the bound: every addend is pushed up by half a step."""
    step = 2.0**-51
    values = torch.full((100_000,), 0.75 * step, dtype=torch.float64)
    values[0] = 1.0 - step
    grid = round_to_grid(values, bound=1.0)
    exact = sum((Fraction(value) for value in grid.tolist()), Fraction(0))
    assert Fraction(float(grid.sum())) == exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_argument_is_left_alone(dtype):
    values = torch.tensor([0.1, 0.2], dtype=dtype)
    before = values.clone()
    assert round_to_grid(values, bound=1e6).dtype == torch.float64
    assert torch.equal(values, before)
