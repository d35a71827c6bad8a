"""Slow, obvious float64 answers for small problems, against which the product is tested.

Everything here is written from the formulas alone and shares no code with the package. Nothing is optimised: draws,
groups and masks are enumerated, so keep n at 10 or below (16 for `best_mask`).

Shape suffixes: N samples, K selected, D features, G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, permutations, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
SetFunction = Callable[[Mask], float]
"""Maps a bool mask (N,), True = kept, to a number."""


# ---------------------------------------------------------------------------------------------------------------------
# The policy: ordered draws without replacement
# ---------------------------------------------------------------------------------------------------------------------


def log_prob_of_draw(logits_N: Tensor, draw_K: tuple[int, ...]) -> Tensor:
    """Log-probability of one ordered Plackett-Luce draw, by its definition; autograd can differentiate it.

    sum_t [ phi_{i_t} - logsumexp(phi over samples not drawn before t) ]

    Args:
        logits_N: float64 (N,).
        draw_K: distinct rows in the order in which they are drawn.

    Returns:
        float64 scalar.
    """
    remaining = list(range(len(logits_N)))
    log_prob = torch.zeros((), dtype=torch.float64)
    for row in draw_K:
        log_prob = log_prob + logits_N[row] - torch.logsumexp(logits_N[remaining], dim=0)
        remaining.remove(row)
    return log_prob


def enumerate_draws(logits_N: Floats, num_selected: int) -> list[tuple[tuple[int, ...], float]]:
    """Every ordered draw of num_selected of N samples with its probability, by dividing weights step by step."""
    weight_N = np.exp(np.asarray(logits_N, dtype=np.float64))
    draws = []
    for draw_K in permutations(range(len(weight_N)), num_selected):
        probability, left = 1.0, set(range(len(weight_N)))
        for row in draw_K:
            probability *= weight_N[row] / sum(weight_N[i] for i in left)
            left.remove(row)
        draws.append((draw_K, float(probability)))
    return draws


def log_prob_gradient(logits_N: Floats, draw_K: tuple[int, ...]) -> Floats:
    """Gradient (N,) of the log-probability of one ordered draw with respect to the logits, by autograd."""
    phi_N = torch.tensor(np.asarray(logits_N), dtype=torch.float64, requires_grad=True)
    (gradient_N,) = torch.autograd.grad(log_prob_of_draw(phi_N, draw_K), phi_N)
    return gradient_N.numpy()


def expected_reward(logits_N: Floats, num_selected: int, reward: SetFunction) -> float:
    """Exact E[R] over every draw of num_selected samples; R depends on the drawn set alone."""
    num_samples = len(logits_N)
    return sum(p * reward(mask_of(draw_K, num_samples)) for draw_K, p in enumerate_draws(logits_N, num_selected))


def policy_gradient(logits_N: Floats, num_selected: int, reward: SetFunction) -> Floats:
    """Exact gradient (N,) of E[R] with respect to the logits: sum over draws of P(draw) R(draw) dlogP(draw)."""
    num_samples = len(logits_N)
    gradient_N = np.zeros(num_samples)
    for draw_K, probability in enumerate_draws(logits_N, num_selected):
        gradient_N += probability * reward(mask_of(draw_K, num_samples)) * log_prob_gradient(logits_N, draw_K)
    return gradient_N


def expected_group_gradient(
    logits_N: Floats,
    num_selected: int,
    num_rollouts: int,
    reward: SetFunction,
    advantage: Callable[[Floats], Floats],
) -> Floats:
    """Exact expectation (N,) of mean_g A_g dlogP_g over every group of ordered draws.

    There are (N! / (N - K)!) ** G groups: N = 3, K = 1, G = 2 has 9 of them, N = 4, K = 2, G = 3 has 1,728.

    Args:
        logits_N: float64 (N,).
        num_selected: samples in a draw, K.
        num_rollouts: independent draws in a group, G.
        reward: value of a draw, from its mask.
        advantage: rewards (G,) of a group to advantages (G,).
    """
    num_samples = len(logits_N)
    outcomes = [
        (probability, reward(mask_of(draw_K, num_samples)), log_prob_gradient(logits_N, draw_K))
        for draw_K, probability in enumerate_draws(logits_N, num_selected)
    ]
    expectation_N = np.zeros(num_samples)
    for group in product(outcomes, repeat=num_rollouts):
        probability = np.prod([outcome[0] for outcome in group])
        advantage_G = advantage(np.array([outcome[1] for outcome in group]))
        gradient_GN = np.array([outcome[2] for outcome in group])
        expectation_N += probability * np.mean(advantage_G[:, None] * gradient_GN, axis=0)
    return expectation_N


def group_relative_advantage(reward_G: Floats, eps: float) -> Floats:
    """(R - mean) / (population std + eps), (G,); zeros where all rewards are equal."""
    if np.all(reward_G == reward_G[0]):
        return np.zeros_like(reward_G)
    return (reward_G - np.mean(reward_G)) / (np.std(reward_G) + eps)


def leave_one_out_advantage(reward_G: Floats) -> Floats:
    """R_g minus the mean of the other rewards, (G,)."""
    return np.array([reward_G[g] - np.mean(np.delete(reward_G, g)) for g in range(len(reward_G))])


def group_relative_gradient(
    logits_N: Floats, num_selected: int, num_rollouts: int, reward: SetFunction, eps: float
) -> Floats:
    """What the group-relative estimator estimates, (N,): a biased stand-in for the policy gradient."""
    return expected_group_gradient(
        logits_N, num_selected, num_rollouts, reward, lambda reward_G: group_relative_advantage(reward_G, eps)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Set functions. All take a mask of any size; `num_selected` is the budget K that the normalisation uses.
# ---------------------------------------------------------------------------------------------------------------------


def quality_mean(mask_N: Mask, quality_N: Floats, *, num_selected: int) -> float:
    """Sum of the quality of the kept samples / K."""
    return float(sum(quality_N[i] for i in np.flatnonzero(mask_N))) / num_selected


def facility_location(mask_N: Mask, features_ND: Floats) -> float:
    """Mean over all samples v of the largest max(0, cosine(v, i)) over kept i; 0 for the empty set."""
    if not np.any(mask_N):
        return 0.0
    unit_ND = features_ND / np.linalg.norm(features_ND, axis=1, keepdims=True)
    similarity_NK = np.maximum(0.0, unit_ND @ unit_ND[mask_N].T)
    return float(np.mean(np.max(similarity_NK, axis=1)))


def pairwise(mask_N: Mask, features_ND: Floats, *, num_selected: int) -> float:
    """Minus the sum of x_i . x_j over ordered pairs of different kept samples / (K (K - 1)); 0 where K = 1."""
    if num_selected == 1:
        return 0.0
    product_KK = features_ND[mask_N] @ features_ND[mask_N].T
    np.fill_diagonal(product_KK, 0.0)
    return -float(np.sum(product_KK)) / (num_selected * (num_selected - 1))


def disf(mask_N: Mask, features_ND: Floats, *, num_selected: int) -> float:
    """Minus the squared Frobenius norm of (1/K) sum z z^T over kept samples; z = x - mean of the whole block."""
    z_ND = features_ND - np.mean(features_ND, axis=0)
    moment_DD = np.zeros((features_ND.shape[1], features_ND.shape[1]))
    for i in np.flatnonzero(mask_N):
        moment_DD += np.outer(z_ND[i], z_ND[i])
    return -float(np.sum((moment_DD / num_selected) ** 2))


def disf_standardized(mask_N: Mask, features_ND: Floats) -> float:
    """Minus the squared correlations summed over ordered pairs of different dimensions, within the kept samples.

    A dimension that does not vary within the kept samples contributes nothing; fewer than two samples give 0.
    """
    kept_KD = features_ND[mask_N]
    if len(kept_KD) < 2:
        return 0.0
    varies_D = np.ptp(kept_KD, axis=0) > 0
    if np.count_nonzero(varies_D) < 2:
        return 0.0
    correlation = np.corrcoef(kept_KD[:, varies_D], rowvar=False)
    np.fill_diagonal(correlation, 0.0)
    return -float(np.sum(correlation**2))


def objective(
    kind: str, features_ND: Floats, quality_N: Floats, *, num_selected: int, quality_weight: float
) -> SetFunction:
    """The set function quality_weight * Q + (1 - quality_weight) * D, raw and uncalibrated.

    Args:
        kind: `facility_location`, `pairwise`, `disf` or `disf_standardized`.
        features_ND: float64 (N, D).
        quality_N: float64 (N,).
        num_selected: the budget K.
        quality_weight: lambda in [0, 1].
    """
    diversity: dict[str, SetFunction] = {
        "facility_location": lambda mask_N: facility_location(mask_N, features_ND),
        "pairwise": lambda mask_N: pairwise(mask_N, features_ND, num_selected=num_selected),
        "disf": lambda mask_N: disf(mask_N, features_ND, num_selected=num_selected),
        "disf_standardized": lambda mask_N: disf_standardized(mask_N, features_ND),
    }
    term = diversity[kind]

    def value(mask_N: Mask) -> float:
        q = quality_mean(mask_N, quality_N, num_selected=num_selected)
        return quality_weight * q + (1.0 - quality_weight) * term(mask_N)

    return value


# ---------------------------------------------------------------------------------------------------------------------
# What can be done with any set function
# ---------------------------------------------------------------------------------------------------------------------


def mask_of(rows: tuple[int, ...] | list[int], num_samples: int) -> Mask:
    """Bool (N,), True at the given rows."""
    mask_N = np.zeros(num_samples, dtype=bool)
    mask_N[list(rows)] = True
    return mask_N


def all_masks(num_samples: int) -> Iterator[Mask]:
    """Every one of the 2^N masks."""
    for bits in product([False, True], repeat=num_samples):
        yield np.array(bits, dtype=bool)


def masks_of_size(num_samples: int, num_selected: int) -> Iterator[Mask]:
    """Every mask that keeps exactly num_selected samples, in lexicographic order of its rows."""
    for rows in combinations(range(num_samples), num_selected):
        yield mask_of(rows, num_samples)


def multilinear_extension(probability_N: Floats, set_function: SetFunction) -> float:
    """E f(S) where every sample is kept independently: sum over masks of prod p^m (1 - p)^(1 - m) f(mask)."""
    expectation = 0.0
    for mask_N in all_masks(len(probability_N)):
        probability = float(np.prod(np.where(mask_N, probability_N, 1.0 - probability_N)))
        # Most masks are impossible where some p are 0 or 1, and their values need not be known.
        if probability != 0.0:
            expectation += probability * set_function(mask_N)
    return expectation


def multilinear_gradient(probability_N: Floats, set_function: SetFunction) -> Floats:
    """dF/dp_i = E[f(S + i) - f(S - i)], (N,): the extension at p_i = 1 minus the extension at p_i = 0."""
    gradient_N = np.zeros(len(probability_N))
    for i in range(len(probability_N)):
        above_N, below_N = np.array(probability_N, dtype=float), np.array(probability_N, dtype=float)
        above_N[i], below_N[i] = 1.0, 0.0
        gradient_N[i] = multilinear_extension(above_N, set_function) - multilinear_extension(below_N, set_function)
    return gradient_N


def marginal_gains(mask_N: Mask, set_function: SetFunction) -> Floats:
    """f(S + i) - f(S - i) for every sample i, (N,)."""
    gain_N = np.zeros(len(mask_N))
    for i in range(len(mask_N)):
        with_N, without_N = mask_N.copy(), mask_N.copy()
        with_N[i], without_N[i] = True, False
        gain_N[i] = set_function(with_N) - set_function(without_N)
    return gain_N


def best_mask(num_samples: int, num_selected: int, set_function: SetFunction) -> tuple[Mask, float]:
    """The mask of exactly num_selected samples with the largest value, and that value; the first one of equals."""
    best_N, best_value = np.zeros(num_samples, dtype=bool), -np.inf
    for mask_N in masks_of_size(num_samples, num_selected):
        value = set_function(mask_N)
        if value > best_value:
            best_N, best_value = mask_N, value
    return best_N, best_value


def naive_greedy(num_samples: int, num_selected: int, set_function: SetFunction) -> Mask:
    """Adds, num_selected times, the sample with the largest f(S + i); the first row of equals."""
    mask_N = np.zeros(num_samples, dtype=bool)
    for _ in range(num_selected):
        best_row, best_value = -1, -np.inf
        for i in np.flatnonzero(~mask_N):
            trial_N = mask_N.copy()
            trial_N[i] = True
            value = set_function(trial_N)
            if value > best_value:
                best_row, best_value = int(i), value
        mask_N[best_row] = True
    return mask_N
