"""The nearest neighbours of every sample by cosine, exact, without an N x N matrix.

Shapes: N samples, V samples whose neighbours are wanted, C samples of a chunk, T neighbours, D features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from datamask_pl.functional.device import rows_at_once

# Rows whose similarities to all others are held at once: 4096 x 8192 float32 is 128 MiB.
QUERY_ROWS = 4096
KEY_ROWS = 8192


def nearest_neighbors(
    features: Callable[[slice], Tensor], num_samples: int, query_rows: range, *, num_neighbors: int
) -> tuple[Tensor, Tensor]:
    """Finds the most similar samples of each queried sample, itself included, most similar first.

    2 V N D flops in blocked matrix products with a running best list; memory is the table and one block of products.

    Args:
        features: returns float32 (C, D) unit rows of a slice of samples.
        num_samples: N.
        query_rows: contiguous rows whose neighbours are wanted.
        num_neighbors: T, at most N.

    Returns:
        similarity_TV: float32 (T, V), max(0, cosine), not increasing along T.
        neighbor_TV: int32 (T, V), rows of the neighbours.

    Example:
        >>> x = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
        >>> similarity_TV, neighbor_TV = nearest_neighbors(lambda rows: x[rows], 3, range(3), num_neighbors=2)
        >>> neighbor_TV[0].tolist(), neighbor_TV[1, 0].item()
        ([0, 1, 2], 1)
    """
    num_rows = rows_at_once(QUERY_ROWS, features(slice(0, 0)).device)
    chunks = [
        _neighbors_of_chunk(features, num_samples, slice(start, min(start + num_rows, query_rows.stop)), num_neighbors)
        for start in range(query_rows.start, query_rows.stop, num_rows)
    ]
    if not chunks:
        empty = features(slice(0, 0))
        return empty.new_empty(num_neighbors, 0), torch.empty(num_neighbors, 0, dtype=torch.int32, device=empty.device)
    similarity_TV = torch.cat([similarity_CT for similarity_CT, _ in chunks]).T.contiguous()
    neighbor_TV = torch.cat([neighbor_CT for _, neighbor_CT in chunks]).T.contiguous()
    return similarity_TV, neighbor_TV


def _neighbors_of_chunk(
    features: Callable[[slice], Tensor], num_samples: int, rows: slice, num_neighbors: int
) -> tuple[Tensor, Tensor]:
    queries_CD = features(rows)
    own_C1 = torch.arange(rows.start, rows.stop, device=queries_CD.device)[:, None]
    best_CT = queries_CD.new_empty(queries_CD.shape[0], 0)
    index_CT = own_C1.new_empty(queries_CD.shape[0], 0)
    num_keys = rows_at_once(KEY_ROWS, queries_CD.device)
    for start in range(0, num_samples, num_keys):
        keys = slice(start, min(start + num_keys, num_samples))
        similarity_CC = queries_CD @ features(keys).T
        if rows.start < keys.stop and keys.start < rows.stop:
            # A sample is first among its own neighbours, also where a copy of it rounds to a higher product.
            own = slice(max(rows.start, keys.start), min(rows.stop, keys.stop))
            own_rows = torch.arange(own.start, own.stop, device=queries_CD.device)
            similarity_CC[own_rows - rows.start, own_rows - keys.start] = torch.inf
        top_CT = similarity_CC.topk(min(num_neighbors, keys.stop - keys.start), dim=1)
        best_CT = torch.cat([best_CT, top_CT.values], dim=1)
        index_CT = torch.cat([index_CT, top_CT.indices + start], dim=1)
        if best_CT.shape[1] > num_neighbors:
            kept_CT = best_CT.topk(num_neighbors, dim=1)
            best_CT, index_CT = kept_CT.values, index_CT.gather(1, kept_CT.indices)
    best_CT, order_CT = best_CT.sort(dim=1, descending=True, stable=True)
    best_CT[:, 0] = queries_CD.square().sum(1)
    # a copy of the sample may round to more than the sample itself, and lists do not increase
    best_CT = torch.minimum(best_CT, best_CT[:, :1]).clamp_(min=0.0)
    return best_CT, index_CT.gather(1, order_CT).int()
