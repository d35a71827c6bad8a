"""Samples whose features are the same to the last bit, of which a corpus may have thousands: boilerplate, error pages.

The search for similar pairs multiplies one by one the pairs that quick products cannot tell apart, and duplicates can
never be told apart: C duplicates are C^2 pairs. They share one list, so one is searched, or as many as a list can hold.

Shapes: N samples, C samples of a part, U samples that are searched, S samples that are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from datamask_pl.functional.kernels import take_rows
from datamask_pl.functional.neighbors.pairs import Features

# Fewer duplicates of a sample cost less than they could save.
MIN_DUPLICATES = 32
# Samples that are compared at a time.
COMPARED_ROWS = 4096
# Features that tell most samples apart; those whose are the same are looked at as a whole.
HASHED_FEATURES = 8
# Of the random numbers of a hash.
SEED = 37


class Duplicates(NamedTuple):
    """The duplicates that are in no list of another sample, and need no search of their own.

    Attributes:
        kept_U: int64 (U,), all other samples, ascending.
        rows_S: int64 (S,), the duplicates that are not searched, ascending.
        model_S: int64 (S,), places in `kept_U` of duplicates that have the same list but for themselves.
    """

    kept_U: Tensor
    rows_S: Tensor
    model_S: Tensor


def hash_rows(features_CD: Tensor) -> Tensor:
    """Numbers that are equal for equal rows, whatever the device and the other rows: int64 (C,).

    Args:
        features_CD: float32 or float64.

    Example:
        >>> first, second, third = hash_rows(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).tolist()
        >>> first == third, first == second
        (True, False)
    """
    if features_CD.dtype == torch.float64:
        bits_CD = features_CD.contiguous().view(torch.int64)
        # of a product the sign's bit alone would decide the sign's bit alone, and two signs would cancel
        bits_CD = bits_CD ^ (bits_CD >> 32)
    else:
        bits_CD = features_CD.contiguous().view(torch.int32)
    generator = torch.Generator().manual_seed(SEED)
    odd_D = torch.randint(-(2**62), 2**62, bits_CD.shape[1:], generator=generator).mul_(2).add_(1)
    # sums of integers wrap, and have the same bits in any order
    return (bits_CD * odd_D.to(bits_CD.device)).sum(1)


def first_of_duplicates(features: Features, parts: Iterable[slice]) -> Tensor | None:
    """For each sample the first one with the same features, itself if there is none: int64 (N,).

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        parts: all samples, in order, in parts.

    Returns:
        None where no sample has `MIN_DUPLICATES`; fewer duplicates may stay as they are.

    Example:
        >>> x = torch.eye(2).repeat(40, 1)
        >>> first_of_duplicates(lambda rows: x[rows], [slice(0, 50), slice(50, 80)])[:4]
        tensor([0, 1, 0, 1])
    """
    # few samples that are not duplicates have the same bits in as many features
    hash_N = torch.cat([hash_rows(_some_features(features(rows))) for rows in parts])
    rows_N = torch.arange(len(hash_N), device=hash_N.device)
    rows_C = rows_N[_numbers(hash_N) >= MIN_DUPLICATES]
    if len(rows_C) == 0:
        return None
    hash_C = torch.cat([hash_rows(features(rows)) for rows in torch.split(rows_C, COMPARED_ROWS)])
    rows_C, hash_C = (of_C[_numbers(hash_C) >= MIN_DUPLICATES] for of_C in (rows_C, hash_C))
    if len(rows_C) == 0:
        return None
    distinct_G, group_C = torch.unique(hash_C, return_inverse=True)
    first_G = rows_C.new_full(distinct_G.shape, len(hash_N)).scatter_reduce_(0, group_C, rows_C, "amin")
    for rows, first in zip(
        torch.split(rows_C, COMPARED_ROWS), torch.split(first_G[group_C], COMPARED_ROWS), strict=True
    ):
        # another sample of the same hash may not be a duplicate
        is_copy = (features(rows) == features(first)).all(1)
        rows_N[rows[is_copy]] = first[is_copy]
    return rows_N


def _some_features(features_CD: Tensor) -> Tensor:
    """As many as tell most samples apart, from everywhere."""
    return features_CD[:, :: max(1, features_CD.shape[1] // HASHED_FEATURES)]


def _numbers(hash_C: Tensor) -> Tensor:
    """How many samples have each sample's hash: int64 (C,)."""
    _, group_C, count_G = torch.unique(hash_C, return_inverse=True, return_counts=True)
    return take_rows(count_G, group_C)


def find_duplicates(first_N: Tensor, num_neighbors: int) -> Duplicates | None:
    """The duplicates that are in no list of `num_neighbors` but their own.

    Samples of equal similarity come in row order: a list begins with the sample itself, and has the first duplicates of
    others.

    Args:
        first_N: int64 (N,), from `first_of_duplicates`.
        num_neighbors: T, of a list with the sample itself.

    Returns:
        None if there are none.

    Example:
        >>> find_duplicates(torch.tensor([0, 1, 0, 0, 0]), 2)
        Duplicates(kept_U=tensor([0, 1, 2]), rows_S=tensor([3, 4]), model_S=tensor([2, 2]))
    """
    order_N = first_N.argsort(stable=True)
    sorted_N = first_N[order_N]
    start_N = torch.searchsorted(sorted_N, sorted_N)
    number_N = torch.arange(len(first_N), device=first_N.device) - start_N
    is_left_N = number_N >= num_neighbors
    if not bool(is_left_N.any()):
        return None
    rows_S, rank_S = order_N[is_left_N].sort()
    models_S = order_N[start_N[is_left_N] + num_neighbors - 1][rank_S]
    is_kept_N = torch.ones_like(first_N, dtype=torch.bool)
    is_kept_N[rows_S] = False
    kept_U = is_kept_N.nonzero().squeeze(1)
    return Duplicates(kept_U, rows_S, torch.searchsorted(kept_U, models_S))
