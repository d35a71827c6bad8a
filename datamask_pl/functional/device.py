"""Where tensors live: what fits on a device, how tensors get there, and what it can do."""

from __future__ import annotations

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


def multiplies_bfloat16(device: torch.device) -> bool:
    """True if products of bfloat16 are known to be several times as fast as those of float32.

    Example:
        >>> multiplies_bfloat16(torch.device("meta"))
        False
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # torch 2.10 does not tell
    ask = getattr(torch.cpu, "get_capabilities", None)
    if device.type != "cpu" or ask is None:
        return False
    return bool(ask().get("amx_bf16") or ask().get("avx512_bf16"))


def backend(device: torch.device) -> str:
    """Process group backend: objects and flags go through the host, so that a GPU does not wait for them.

    Example:
        >>> backend(torch.device("cpu"))
        'gloo'
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
