"""Selection, products and packed flags, each in the form that is fastest on its device.

Plain versions of the bit tricks are the oracles of the tests.

Shapes: N samples, P and C samples of two panels, E pairs, D features; R rows and C columns of a matrix of values.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

# Pairs that a GPU multiplies at a time: a sum of another shape may add in another order.
GPU_PAIRS = 2**16
# Rows of bfloat16 matrices on a CPU are filled up to a multiple of this.
BFLOAT16_ROWS = 128

# torch warns once per process that sparse tensors, which `pair_products` needs, are a beta
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)


def take_rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Some rows of a tensor: a view of a slice's, a copy of others.

    Args:
        tensor: (N, ...).
        rows: a slice, numbers of rows, or bool (N,).

    Example:
        >>> take_rows(torch.tensor([3, 4, 5]), torch.tensor([2, 0]))
        tensor([5, 3])
    """
    # four times as fast as an index in brackets
    if isinstance(rows, Tensor) and rows.dtype != torch.bool:
        return tensor.index_select(0, rows)
    return tensor[rows]


def smallest(keys_N: Tensor, num_selected: int) -> Tensor:
    """Positions of the smallest keys, smallest first; keys are distinct, or ties fall as they may.

    Args:
        keys_N: float (N,).
        num_selected: K, in [1, N].

    Returns:
        int64 (K,).

    Example:
        >>> smallest(torch.tensor([3.0, 1.0, 2.0]), 2)
        tensor([1, 2])
    """
    if keys_N.device.type != "cpu":
        return keys_N.topk(num_selected, largest=False, sorted=True).indices
    # numpy's introselect and vectorised sort are several times faster than torch's on a CPU
    keys = keys_N.numpy()
    if 2 * num_selected > keys.size:
        return torch.from_numpy(np.argsort(keys)[:num_selected])
    chosen = np.argpartition(keys, num_selected - 1)[:num_selected]
    return torch.from_numpy(chosen[np.argsort(keys[chosen])])


def first_largest(values_N: Tensor, count: int) -> Tensor:
    """Positions of the largest values, largest first, equal ones as they come: as a stable sort, without sorting all.

    Args:
        values_N: float (N,), finite.
        count: how many, all if there are fewer.

    Returns:
        int64 (at most `count`,).

    Example:
        >>> first_largest(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        tensor([1, 3, 2])
    """
    if values_N.numel() <= count:
        return values_N.argsort(descending=True, stable=True)
    threshold = values_N.kthvalue(values_N.numel() - count + 1).values
    candidates = (values_N >= threshold).nonzero().squeeze(1)
    return candidates[values_N[candidates].argsort(descending=True, stable=True)[:count]]


def top_k_mask(logits_N: Tensor, num_selected: int) -> Tensor:
    """The samples with the largest logits; equal logits are taken in row order, on every device.

    Args:
        logits_N: float (N,), finite.
        num_selected: the budget, in [1, N].

    Returns:
        bool (N,) with exactly `num_selected` True.

    Example:
        >>> top_k_mask(torch.tensor([1.0, 3.0, 1.0, 1.0]), 2)
        tensor([ True,  True, False, False])
    """
    threshold = logits_N.kthvalue(logits_N.numel() - num_selected + 1).values
    mask_N = logits_N > threshold
    ties = (logits_N == threshold).nonzero().squeeze(1)
    mask_N[ties[: num_selected - int(mask_N.sum())]] = True
    return mask_N


def positions(is_wanted_N: Tensor) -> Tensor:
    """Positions of the True ones, in order.

    Args:
        is_wanted_N: bool (N,).

    Returns:
        int64, as many as there are.

    Example:
        >>> positions(torch.tensor([True, False, True]))
        tensor([0, 2])
    """
    if is_wanted_N.device.type != "cpu":
        return is_wanted_N.nonzero().squeeze(1)
    # three times faster than torch's
    return torch.from_numpy(np.flatnonzero(is_wanted_N.numpy()))


def multiply_bfloat16(left_PD: Tensor, right_CD: Tensor) -> Tensor:
    """Products of rows rounded to bfloat16, added in float32: bfloat16 (P, C) on a CPU, float32 on a GPU.

    A CPU compiles a program for each pair of shapes, in 5 ms, and keeps a thousand of them, 0.7 GB: few shapes are
    multiplied.

    Example:
        >>> multiply_bfloat16(torch.eye(2), torch.ones(1, 2))
        tensor([[1.],
                [1.]], dtype=torch.bfloat16)
    """
    if left_PD.device.type != "cpu":  # results in bfloat16 may have been added in it
        products: Tensor = torch.mm(left_PD.bfloat16(), right_CD.bfloat16().T, out_dtype=torch.float32)
        return products
    left, right = (_filled_up(rows) for rows in (left_PD, right_CD))
    return (left @ right.T)[: len(left_PD), : len(right_CD)]


def _filled_up(rows_PD: Tensor) -> Tensor:
    """The rows in bfloat16, with zeros up to a multiple of BFLOAT16_ROWS."""
    num_rows, num_features = rows_PD.shape
    filled = torch.empty(-(-num_rows // BFLOAT16_ROWS) * BFLOAT16_ROWS, num_features, dtype=torch.bfloat16)
    filled[:num_rows] = rows_PD
    filled[num_rows:] = 0
    return filled


def pair_products(left_PD: Tensor, right_CD: Tensor, row_E: Tensor, column_E: Tensor) -> Tensor:
    """Inner products of some pairs of rows, of which each has bits that depend on its two rows alone: (E,).

    Args:
        left_PD: float (P, D).
        right_CD: float (C, D).
        row_E: int64 (E,), ascending.
        column_E: int64 (E,).

    Example:
        >>> pair_products(torch.eye(2), torch.ones(1, 2), torch.tensor([1]), torch.tensor([0]))
        tensor([1.])
    """
    if left_PD.device.type == "cpu":
        first_P = torch.zeros(len(left_PD) + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row_E, minlength=len(left_PD)), 0, out=first_P[1:])
        pairs = torch.sparse_csr_tensor(
            first_P, column_E, left_PD.new_zeros(len(row_E)), (len(left_PD), len(right_CD)), check_invariants=False
        )
        multiplied: Tensor = torch.sparse.sampled_addmm(pairs, left_PD, right_CD.T, beta=0.0).values()
        return multiplied
    products_E = left_PD.new_empty(-(-len(row_E) // GPU_PAIRS) * GPU_PAIRS)
    padding = 0, len(products_E) - len(row_E)
    both = (torch.split(torch.nn.functional.pad(index_E, padding), GPU_PAIRS) for index_E in (row_E, column_E))
    for part, row, column in zip(torch.split(products_E, GPU_PAIRS), *both, strict=True):
        torch.sum(left_PD[row] * right_CD[column], dim=1, out=part)
    return products_E[: len(row_E)]


def highest_above_zero(values_RC: Tensor) -> Tensor:
    """The largest of each row, 0 where none is above it.

    Example:
        >>> highest_above_zero(torch.tensor([[3.0, -1.0], [-2.0, -1.0]]))
        tensor([3., 0.])
    """
    if values_RC.device.type != "cpu" or values_RC.dtype != torch.bfloat16:
        return values_RC.amax(1).clamp_(min=0)
    # three times as fast: the bits of positive numbers order as the numbers do, and are above all others
    return values_RC.view(torch.int16).amax(1).clamp_(min=0).view(torch.bfloat16)


def kth_largest(values_RC: Tensor, rank: int) -> Tensor:
    """The `rank`-th largest of each row.

    Example:
        >>> kth_largest(torch.tensor([[3.0, 1.0, 2.0]]), 2)
        tensor([2.])
    """
    if values_RC.device.type != "cpu":
        return values_RC.topk(rank, dim=1).values[:, -1]
    place = values_RC.shape[1] - rank
    if values_RC.dtype != torch.bfloat16:
        return torch.from_numpy(np.partition(values_RC.numpy(), place, axis=1)[:, place].copy())
    # numpy has no bfloat16, but selects among integers of 16 bits several times as fast
    ordered = np.partition(_ordered_bits(values_RC).numpy(), place, axis=1)[:, place]
    return _ordered_bits(torch.from_numpy(ordered.copy()).view(torch.bfloat16)).view(torch.bfloat16)


def _ordered_bits(values: Tensor) -> Tensor:
    """The bits of bfloat16 as int16 that order as the numbers do; its own inverse."""
    bits = values.view(torch.int16)
    return bits ^ ((bits >> 15) & 0x7FFF)


def positions_from(values_RC: Tensor, bound_R: Tensor | None, bound_C: Tensor | None) -> Tensor:
    """Positions r * C + c of the values that reach the bound of their row or of their column: int64, ascending.

    Args:
        values_RC: float (R, C). Few of them are wanted.
        bound_R: of the same type (R,); None for no bounds, as if they were infinite.
        bound_C: (C,), likewise; one of the two is not None.

    Example:
        >>> positions_from(torch.tensor([[3.0, 1.0], [1.0, 2.0]]), torch.tensor([2.0, 2.5]), None)
        tensor([0])
    """
    bounds = [] if bound_R is None else [bound_R[:, None]]
    bounds += [] if bound_C is None else [bound_C[None]]
    if values_RC.device.type != "cpu":
        is_wanted_RC = values_RC >= bounds[0]
        for bound in bounds[1:]:
            is_wanted_RC |= values_RC >= bound
        return is_wanted_RC.flatten().nonzero().squeeze(1)
    if values_RC.dtype == torch.bfloat16:
        # numpy has no bfloat16: the bits of positive numbers order as the numbers do, and are above all others
        is_positive = all(bool((bound > 0).all()) for bound in bounds)
        values_RC, *bounds = (it.view(torch.int16) if is_positive else it.float() for it in (values_RC, *bounds))
    # 1. numpy compares with vector instructions, into flags of a byte each
    num_values = values_RC.numel()
    flags = np.zeros(-(-num_values // 8) * 8, dtype=np.bool_)
    flags_RC = flags[:num_values].reshape(values_RC.shape)
    np.greater_equal(values_RC.numpy(), bounds[0].numpy(), out=flags_RC)
    for bound in bounds[1:]:
        flags_RC |= values_RC.numpy() >= bound.numpy()
    # 2. eight flags are one integer; few are not 0, so this looks at an eighth of the numbers
    words = np.flatnonzero(flags.view(np.int64) != 0)
    # 3. within these integers: hit h is flag h % 8 of integer h // 8
    hits = np.flatnonzero(flags.view(np.int64)[words].view(np.bool_))
    return torch.from_numpy((words[hits >> 3] << 3) + (hits & 7))


def pack_bits(is_set_NR: Tensor) -> Tensor:
    """Rows of flags as `unpack_bits` takes them: uint8 (N, B), on a CPU eight flags a byte.

    Looking up random rows takes as long as it takes to fetch them from memory.

    Example:
        >>> pack_bits(torch.tensor([[True, False, True]]))
        tensor([[160]], dtype=torch.uint8)
    """
    if is_set_NR.device.type != "cpu":
        return is_set_NR.to(torch.uint8)
    return torch.from_numpy(np.packbits(is_set_NR.numpy(), axis=1))


def unpack_bits(packed_NB: Tensor, num_flags: int) -> Tensor:
    """The flags as 0 and 1: uint8 (N, R).

    Example:
        >>> unpack_bits(pack_bits(torch.tensor([[True, False, True]])), 3)
        tensor([[1, 0, 1]], dtype=torch.uint8)
    """
    if packed_NB.device.type != "cpu":
        return packed_NB
    return torch.from_numpy(np.unpackbits(packed_NB.numpy(), axis=1, count=num_flags))


def stable_order(labels_E: Tensor, num_labels: int) -> Tensor:
    """The order that sorts int64 labels from 0 to `num_labels` - 1, equal ones as they come: int64 (E,).

    Example:
        >>> stable_order(torch.tensor([1, 0, 1, 0]), 2)
        tensor([1, 3, 0, 2])
    """
    if labels_E.device.type != "cpu":
        return labels_E.argsort(stable=True)
    # of 16 bits: numpy sorts those by counting
    labels = labels_E.numpy().astype(np.uint16 if num_labels <= 2**16 else np.int64)
    return torch.from_numpy(labels.argsort(kind="stable"))
