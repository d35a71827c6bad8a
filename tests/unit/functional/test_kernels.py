import numpy as np
import pytest
import torch

from datamask_pl.functional import kernels
from datamask_pl.functional.kernels import (
    first_largest,
    highest_above_zero,
    kth_largest,
    multiply_bfloat16,
    pack_bits,
    pair_products,
    positions,
    positions_from,
    smallest,
    stable_order,
    take_rows,
    top_k_mask,
    unpack_bits,
)
from tests.support import oracles
from tests.support.pretended_accelerator import pretend

ANYWHERE = pytest.mark.parametrize("where", [lambda tensor: tensor, pretend], ids=["cpu", "pretended"])


def numbers(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape), dtype=torch.float32)


def test_rows_are_a_view_of_a_slice_and_a_copy_of_others():
    tensor_ND = numbers(6, 2)
    assert take_rows(tensor_ND, slice(1, 4)).data_ptr() == tensor_ND[1:].data_ptr()
    is_wanted_N = torch.tensor([True, False, False, True, False, True])
    for rows in (torch.tensor([5, 0, 5]), is_wanted_N):
        np.testing.assert_array_equal(take_rows(tensor_ND, rows), tensor_ND.numpy()[rows.numpy()])


@ANYWHERE
@pytest.mark.parametrize("num_selected", [1, 10, 20, 21, 40])
def test_the_smallest_come_in_order(num_selected, where):
    keys_N = numbers(40)
    expected = sorted(range(40), key=keys_N.tolist().__getitem__)[:num_selected]
    assert smallest(where(keys_N), num_selected).tolist() == expected


@ANYWHERE
@pytest.mark.parametrize("num_selected", [1, 500, 1500, 2500, 4999])
def test_of_many_the_smallest_come_in_order(num_selected, where):
    """Few are sorted as a whole, wherever they are cut."""
    for seed in range(3):
        keys_N = torch.tensor(np.random.default_rng(seed).permutation(5000), dtype=torch.float64)
        assert smallest(where(keys_N), num_selected).tolist() == keys_N.argsort()[:num_selected].tolist()


@ANYWHERE
def test_positions_are_those_of_what_is_wanted(where):
    is_wanted_N = numbers(50) > 0
    expected = [row for row, is_wanted in enumerate(is_wanted_N.tolist()) if is_wanted]
    assert positions(where(is_wanted_N)).tolist() == expected


@ANYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_the_kth_largest_is_that_of_sorting(rank, dtype, where):
    values_RC = numbers(5, 9).to(dtype)
    before_RC = values_RC.clone()
    expected = [sorted(row, reverse=True)[rank - 1] for row in values_RC.tolist()]
    found_R = kth_largest(where(values_RC), rank)
    assert found_R.dtype == dtype
    assert found_R.tolist() == expected
    assert torch.equal(values_RC, before_RC)


@ANYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_of_a_row_is_0_where_none_is_above(dtype, where):
    values_RC = numbers(5, 9).to(dtype)
    values_RC[1] = -values_RC[1].abs()
    values_RC[2] = 0.0
    values_RC[3] = -values_RC[3].abs()
    values_RC[3, 4] = 1e-38
    expected = [max(0.0, *row) for row in values_RC.tolist()]
    found_R = highest_above_zero(where(values_RC))
    assert found_R.dtype == dtype
    assert found_R.tolist() == expected
    assert expected[1:3] == [0.0, 0.0]


@ANYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [0.0, -3.0])
def test_a_value_is_wanted_by_its_row_or_by_its_column(low, dtype, where):
    """With bounds that are not positive, bits of negative numbers would order the wrong way round."""
    values_RC, bound_R, bound_C = (numbers(*shape, seed=len(shape)).to(dtype) for shape in ((5, 9), (5,), (9,)))
    bound_R, bound_C = bound_R.abs() + 0.1 + low, bound_C.abs() + 0.1 + low
    bound_R[0], bound_C[1] = values_RC[0, 3], values_RC[4, 1]  # exactly at the bound
    for low_R, low_C in [(bound_R, None), (None, bound_C), (bound_R, bound_C)]:
        expected = [
            r * 9 + c
            for r, row in enumerate(values_RC.tolist())
            for c, value in enumerate(row)
            if (low_R is not None and value >= low_R.tolist()[r]) or (low_C is not None and value >= low_C.tolist()[c])
        ]
        found = positions_from(where(values_RC), low_R, low_C)
        assert found.tolist() == expected
        assert found.dtype == torch.int64


@ANYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_zero_is_wanted_where_zero_is(dtype, where):
    values_RC = torch.tensor([[0.0, -0.0, -1.0, 1.0]], dtype=dtype)
    assert positions_from(where(values_RC), torch.zeros(1, dtype=dtype), None).tolist() == [0, 1, 3]


def test_a_gpu_adds_products_of_bfloat16_up_in_float32_and_returns_them_so(monkeypatch):
    def product(left_PD, right_DC, *, out_dtype):
        return (left_PD.double() @ right_DC.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", product)
    left_PD, right_CD = numbers(3, 5).bfloat16(), numbers(4, 5, seed=1).bfloat16()
    products_PC = multiply_bfloat16(pretend(left_PD), right_CD)
    assert products_PC.dtype == torch.float32
    np.testing.assert_allclose(products_PC.numpy(), left_PD.double().numpy() @ right_CD.double().numpy().T, rtol=1e-6)


@ANYWHERE
@pytest.mark.parametrize("num_pairs", [0, 1, 4, 30])
def test_pairs_are_multiplied_wherever_they_are_cut(monkeypatch, num_pairs, where):
    monkeypatch.setattr(kernels, "GPU_PAIRS", 4)
    left_PD, right_CD = numbers(6, 3), numbers(8, 3, seed=1)
    rng = np.random.default_rng(2)
    row_E = torch.tensor(np.sort(rng.integers(0, 6, size=num_pairs)))
    column_E = torch.tensor(rng.integers(0, 8, size=num_pairs))
    products_PC = left_PD.double().numpy() @ right_CD.double().numpy().T
    found_E = pair_products(where(left_PD), where(right_CD), row_E, column_E)
    np.testing.assert_allclose(found_E.numpy(), products_PC[row_E.numpy(), column_E.numpy()], rtol=1e-5, atol=1e-6)


@ANYWHERE
@pytest.mark.parametrize("num_flags", [1, 8, 19])
def test_packed_flags_come_back(num_flags, where):
    is_set_NR = numbers(11, num_flags) > 0
    packed_NB = pack_bits(where(is_set_NR))
    assert packed_NB.dtype == torch.uint8
    flags_NR = unpack_bits(packed_NB, num_flags)
    assert flags_NR.dtype == torch.uint8
    assert flags_NR.tolist() == is_set_NR.int().tolist()


def test_eight_flags_take_a_byte_on_a_cpu():
    assert pack_bits(torch.ones(3, 17, dtype=torch.bool)).shape == (3, 3)


@ANYWHERE
@pytest.mark.parametrize("num_labels", [3, 2**16, 2**16 + 1, 2**40])
def test_equal_labels_stay_in_order(num_labels, where):
    labels = np.random.default_rng(0).integers(0, 3, size=200)
    labels[labels == 2] = num_labels - 1
    expected = sorted(range(200), key=labels.__getitem__)
    assert stable_order(where(torch.tensor(labels)), num_labels).tolist() == expected


@pytest.mark.parametrize("num_selected", [1, 2, 50, 99, 100])
@pytest.mark.parametrize("num_levels", [1, 2, 7, 1000])
def test_top_k_is_a_stable_sort_cut_at_the_budget(num_selected, num_levels):
    """torch #127196: ties in topk differ between devices."""
    logits_N = np.random.default_rng(num_levels).integers(0, num_levels, size=100).astype(np.float32)
    expected_N = oracles.mask_of(list(np.argsort(-logits_N, kind="stable")[:num_selected]), 100)
    mask_N = top_k_mask(torch.tensor(logits_N), num_selected)
    assert mask_N.dtype == torch.bool
    np.testing.assert_array_equal(mask_N, expected_N)


def test_minus_zero_ties_with_zero():
    logits_N = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0])
    assert top_k_mask(logits_N, 2).tolist() == [False, True, True, False, False]
    assert top_k_mask(-logits_N, 2).tolist() == [True, True, False, False, False]


def test_a_million_equal_logits_keep_the_first_rows():
    mask_N = top_k_mask(torch.zeros(1_000_000), 300_000)
    assert bool(mask_N[:300_000].all())
    assert not mask_N[300_000:].any()


def test_top_k_leaves_the_logits_alone_and_handles_extremes():
    logits_N = torch.tensor([3e38, -3e38, 1e-45, 0.0])
    assert top_k_mask(logits_N, 2).tolist() == [True, False, True, False]
    assert logits_N.tolist()[3] == 0.0


@pytest.mark.parametrize("num_levels", [2, 9, 10_000])
@pytest.mark.parametrize("count", [1, 7, 299, 300, 400])
def test_the_first_largest_are_those_of_a_stable_sort(count, num_levels):
    values_N = np.random.default_rng(0).integers(0, num_levels, size=300).astype(float)
    expected = np.argsort(-values_N, kind="stable")[:count]
    assert first_largest(torch.tensor(values_N), count).tolist() == expected.tolist()
