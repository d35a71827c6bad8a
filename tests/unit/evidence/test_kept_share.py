"""What was kept by group and by length, against counting row by row."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.evidence.kept_share import MAX_GROUPS, by_group, by_length

rows = st.lists(st.tuples(st.sampled_from(["a", "b", "ü", None]), st.booleans()), min_size=1)


@given(rows=rows, cut=st.integers(0, 20))
def test_groups_are_counted_row_by_row_however_the_column_is_cut(rows, cut):
    names, keep = [name for name, _ in rows], np.array([kept for _, kept in rows])
    pieces = [(pa.array(names[part], pa.string()), keep[part]) for part in (slice(cut), slice(cut, None))]
    found = {share.label: (share.num_rows, share.num_kept) for share in by_group(pieces)}
    assert found == {
        "(none)" if name is None else name: (names.count(name), rows.count((name, True))) for name in set(names)
    }


@pytest.mark.parametrize("values", [[1, 2], [True, False], [Decimal("1.5"), None], [b"x", b"y"]])
def test_groups_may_be_of_any_plain_type(values):
    shares = by_group([(pa.array(values), np.array([True, False]))])
    assert [(share.num_rows, share.num_kept) for share in shares] in ([(1, 1), (1, 0)], [(1, 0), (1, 1)])


def test_the_smallest_of_many_groups_are_put_together():
    names = [f"g{index:03d}" for index in range(40) for _ in range(40 - index)]
    keep = np.array([name < "g030" for name in names])
    shares = by_group([(pa.array(names), keep)])
    assert [share.label for share in shares] == [f"g{index:03d}" for index in range(MAX_GROUPS)] + ["15 smaller groups"]
    assert sum(share.num_rows for share in shares) == len(names)
    assert sum(share.num_kept for share in shares) == keep.sum()


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    seed=st.integers(0, 100),
    data_type=st.sampled_from([pa.int32(), pa.float64(), pa.large_string()]),
)
def test_tenths_of_the_lengths_are_whole_ordered_and_add_up(lengths, seed, data_type):
    keep = np.random.default_rng(seed).random(len(lengths)) < 0.5
    is_text = data_type == pa.large_string()
    values = pa.array(["ü" * length for length in lengths] if is_text else lengths, data_type)
    found = by_length([(values, keep)])
    assert found.median == np.median(lengths)
    assert found.median_kept == pytest.approx(np.median(np.array(lengths)[keep]) if keep.any() else np.nan, nan_ok=True)
    assert len(found.tenths) <= 10
    last = -1
    for share in found.tenths:
        low, _, high = share.label.partition(" to ")
        is_in = [int(low) <= length <= int(high or low) for length in lengths]
        assert int(low) > last
        assert (share.num_rows, share.num_kept) == (sum(is_in), keep[is_in].sum())
        last = int(high or low)
    assert sum(share.num_rows for share in found.tenths) == len(lengths)


def test_rows_without_a_length_are_counted_apart():
    values = pa.array([1.0, None, float("nan"), float("inf")])
    found = by_length([(values, np.array([True, True, False, False]))])
    assert (found.num_null, [share.num_rows for share in found.tenths]) == (3, [1])
    assert by_length([(pa.array([None, None], pa.int64()), np.array([True, True]))]) is None
