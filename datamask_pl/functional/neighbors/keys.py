"""Similarity and row number in one integer, so that selecting the best needs no indices and ties have one order.

A key's upper half orders as the float32 similarity does; its lower half orders equal similarities by row, the first
row highest.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Below every key.
EMPTY_KEY = -(2**63)
_LOW_31_BITS = 2**31 - 1


def make_keys(similarity: Tensor, index: Tensor) -> Tensor:
    """Keys of similarities (float32) to samples (int64, broadcast, below 2^31): int64.

    Example:
        >>> keys = make_keys(torch.tensor([0.5, 0.5, -0.5]), torch.tensor([1, 2, 0]))
        >>> bool(keys[0] > keys[1] > keys[2])
        True
    """
    return (_ordered(similarity.contiguous().view(torch.int32)).long() << 32) + (_LOW_31_BITS - index)


def similarity_of(keys: Tensor) -> Tensor:
    """The float32 similarities of keys; NaN for EMPTY_KEY.

    Example:
        >>> similarity_of(make_keys(torch.tensor([0.5, -0.25]), torch.tensor([3, 4])))
        tensor([ 0.5000, -0.2500])
    """
    return _ordered((keys >> 32).int()).view(torch.float32)


def index_of(keys: Tensor) -> Tensor:
    """The row numbers of keys: int64.

    Example:
        >>> index_of(make_keys(torch.tensor([0.5, -0.25]), torch.tensor([3, 4])))
        tensor([3, 4])
    """
    return _LOW_31_BITS - (keys & 0xFFFFFFFF)


def largest_keys(keys_PW: Tensor, num_largest: int) -> Tensor:
    """The largest of each row, largest first: int64 (P, T), T at most W.

    Example:
        >>> largest_keys(torch.tensor([[3, 1, 2]]), 2)
        tensor([[3, 2]])
    """
    if keys_PW.device.type != "cpu":
        return keys_PW.topk(num_largest, dim=1).values
    # numpy sorts integers with vector instructions, ten times as fast as torch on a CPU
    width = keys_PW.shape[1]
    best_PT = np.partition(keys_PW.numpy(), width - num_largest, axis=1)[:, width - num_largest :]
    best_PT.sort(axis=1)
    return torch.from_numpy(best_PT).flip(1)


def _ordered(bits: Tensor) -> Tensor:
    """Float32 bits as int32 that order as the numbers do; its own inverse."""
    return bits ^ ((bits >> 31) & _LOW_31_BITS)
