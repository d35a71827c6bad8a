"""Small random problems that the tests of the baselines share."""

import torch


def problem(num_samples, num_features, seed):
    """Unit features and qualities in [0, 1), float64."""
    drawn = generator(seed)
    features = torch.randn(num_samples, num_features, generator=drawn, dtype=torch.float64)
    features = features / features.norm(dim=1, keepdim=True)
    return features, torch.rand(num_samples, generator=drawn, dtype=torch.float64)


def generator(seed):
    return torch.Generator().manual_seed(seed)
