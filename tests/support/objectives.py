"""Objectives of a user's own, which tests name by class path."""

import os
import signal
import time

import torch

from datamask_pl.objectives import Objective


class Proxy:
    """Stands for a model: its repr holds an address, which differs from process to process."""


class EvenRows(Objective):
    """The share of the kept samples whose first feature is positive; knows nothing but its value."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale
        self.proxy = Proxy()
        self.num_calls = 0

    def value(self, masks_RN, ground):
        self.num_calls += 1
        is_positive_N = ground.features(slice(None))[:, 0] > 0
        return self.scale * (masks_RN & is_positive_N).sum(1) / ground.num_selected


class NotANumberAfter(Objective):
    """Fails once it has been asked for the value of more than so many masks."""

    def __init__(self, *, num_masks: int = 0) -> None:
        self.num_masks = num_masks
        self.num_seen = 0

    def value(self, masks_RN, ground):
        self.num_seen += len(masks_RN)
        value_R = masks_RN.double() @ torch.arange(ground.num_samples).double()
        return value_R if self.num_seen <= self.num_masks else value_R * torch.nan


class ConstantValue(Objective):
    """No mask is better than any other."""

    def value(self, masks_RN, ground):
        return torch.ones(len(masks_RN))


class WrongShape(Objective):
    """Returns one number for all masks."""

    def value(self, masks_RN, ground):
        return torch.tensor(1.0)


class LogExpectation(Objective):
    """An expectation that is not finite where a probability is 0."""

    def value(self, masks_RN, ground):
        return masks_RN.double() @ ground.quality_N.double()

    def expectation(self, p_N, ground):
        return (p_N * (p_N - p_N.mean()).log()).sum()


class FailsOnRankOne(Objective):
    """Meets on one rank what no other meets."""

    def value(self, masks_RN, ground):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise RuntimeError("the proxy model's GPU is gone")
        return masks_RN.double().sum(1)


class MisbehavesOnRankOne(Objective):
    """Raises, is killed or hangs on one rank, after so many masks were valued there.

    Args:
        how: `raise`, `die` or `hang`.
        num_masks: masks that are valued before.
    """

    def __init__(self, *, how: str, num_masks: int = 0) -> None:
        self.how = how
        self.num_masks = num_masks
        self.num_seen = 0

    def value(self, masks_RN, ground):
        self.num_seen += len(masks_RN)
        is_there = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if is_there and self.num_seen > self.num_masks:
            if self.how == "raise":
                raise RuntimeError("the proxy model's GPU is gone")
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return masks_RN.double() @ ground.quality_N.double()
