"""Random constraints, and the masks they allow by brute force."""

import numpy as np
import torch

from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from tests.support import oracles

KINDS = ["costs", "groups", "group ratios", "groups and costs", "forced", "forced and groups", "forced and costs"]


def make(kind, num_samples, *, seed=0, select_ratio=0.5, is_part=False):
    """A constraint of a kind over random holdings, whose costs are whole numbers."""
    rng = np.random.default_rng([seed, num_samples])
    cost_N = group_N = forced_N = None
    names, group_budget = ("",), "proportional"
    if "cost" in kind:
        cost_N = torch.tensor(rng.integers(1, 8, size=num_samples)).double()
    if "group" in kind:
        names = ("a", "b", "c") if "three" in kind else ("a", "b")
        group_N = torch.tensor(np.arange(num_samples) % 3 // (1 if "three" in kind else 2))
    if "ratios" in kind:
        group_budget = {"a": 0.75}
    if "forced" in kind:
        forced_N = torch.zeros(num_samples, dtype=torch.int8)
        forced_N[int(rng.integers(num_samples))] = 1
        forced_N[int((forced_N == 0).nonzero()[int(rng.integers(num_samples - 1))])] = -1
    holdings = Holdings.of(num_samples, cost_N=cost_N, group_N=group_N, names=names, forced_N=forced_N)
    return Constrained(holdings, BudgetSpec(select_ratio, group_budget), is_part=is_part)


def allowed_masks(constraint):
    """Every mask that the constraint allows, from its definition."""
    holdings = constraint.holdings
    group_N, forced_N = holdings.group_N.numpy(), holdings.forced_N.numpy()
    cost_N = np.ones(len(group_N)) if holdings.cost_N is None else holdings.cost_N.numpy()
    for mask_N in oracles.all_masks(len(group_N)):
        if not mask_N[forced_N > 0].all() or mask_N[forced_N < 0].any():
            continue
        spent = [cost_N[mask_N & (group_N == group)].sum() for group in range(len(holdings.names))]
        pairs = list(zip(spent, constraint.budgets, strict=True))
        if all(cost <= limit if constraint.has_costs else cost == limit for cost, limit in pairs):
            yield mask_N


def enumerate_draws(logits_N, constraint):
    """Every ordered draw with its probability, group by group, by dividing the weights of what still fits."""
    holdings = constraint.holdings
    group_N, forced_N = holdings.group_N.numpy(), holdings.forced_N.numpy()
    cost_N = np.ones(len(group_N)) if holdings.cost_N is None else holdings.cost_N.numpy()
    weight_N = np.exp(np.asarray(logits_N, dtype=np.float64))

    def of_group(rows, room):
        fitting = [row for row in rows if cost_N[row] <= room]
        if not fitting:
            yield (), 1.0
        for row in fitting:
            chance = weight_N[row] / sum(weight_N[i] for i in fitting)
            for rest, probability in of_group([i for i in rows if i != row], room - cost_N[row]):
                yield (row, *rest), chance * probability

    draws = [((), 1.0)]
    for group, limit in enumerate(constraint.budgets):
        kept = (forced_N > 0) & (group_N == group)
        rows = np.flatnonzero((forced_N == 0) & (group_N == group)).tolist()
        more = list(of_group(rows, limit - cost_N[kept].sum()))
        draws = [(one + other, p * q) for one, p in draws for other, q in more]
    kept = tuple(np.flatnonzero(forced_N > 0).tolist())
    return [(kept + rows, probability) for rows, probability in draws]
