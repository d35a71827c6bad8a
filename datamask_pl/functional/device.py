"""All that depends on the device: what fits on it, how tensors get there, and which selection is fastest on it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Share of a GPU's free memory that a block's features may take; the rest is for a step's products.
MAX_RESIDENT_SHARE = 0.5
# 16,384 x 32,768 float32 products are 2 GiB.
GPU_FACTOR = 4


def fits(num_bytes: int, device: torch.device) -> bool:
    """True if a block's features of this size may live on the device; always on a CPU, where they are already.

    Example:
        >>> fits(2**60, torch.device("cpu"))
        True
    """
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= MAX_RESIDENT_SHARE * free_bytes


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. From the host to a GPU through pinned memory, so that neither waits for the other.

    Example:
        >>> move(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def rows_at_once(rows: int, device: torch.device) -> int:
    """How many rows to take at once where a CPU takes `rows`: more on a GPU, whose kernels are slow to start.

    Example:
        >>> rows_at_once(4096, torch.device("cpu")), rows_at_once(4096, torch.device("cuda"))
        (4096, 16384)
    """
    return rows * GPU_FACTOR if device.type == "cuda" else rows


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


def backend(device: torch.device) -> str:
    """Process group backend: objects and flags go through the host, so that a GPU does not wait for them.

    Example:
        >>> backend(torch.device("cpu"))
        'gloo'
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
