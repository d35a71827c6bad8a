"""Where the sums of a step can be exact."""

import pytest
import torch
from lightning.fabric.accelerators.mps import MPSAccelerator
from lightning.pytorch import Trainer

from datamask_pl.distributed.launch import check_launch, choose_accelerator
from datamask_pl.errors import ConfigError
from datamask_pl.objectives import Objective
from datamask_pl.objectives.joint import JointObjective
from tests.support.problems import ground_set, unit_rows


@pytest.mark.parametrize(("asked", "chosen"), [("auto", "cpu"), ("cuda", "cuda"), ("mps", "mps")])
def test_on_a_machine_with_an_apple_gpu_auto_is_the_cpu(monkeypatch, asked, chosen):
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    assert choose_accelerator(asked) == chosen


def test_elsewhere_lightning_chooses(monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: False))
    assert choose_accelerator("auto") == "auto"


def test_another_device_than_cpu_and_cuda_is_refused_with_its_name():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    check_launch(trainer)
    trainer.strategy._root_device = torch.device("mps")
    with pytest.raises(ConfigError, match=r"trainer\.accelerator must be cpu or cuda, got a device of type mps"):
        check_launch(trainer)


class _OnTheHost(Objective):
    def value(self, masks_RN, ground):
        return torch.zeros(len(masks_RN))


def test_values_that_a_custom_objective_left_on_the_host_follow_the_masks():
    """The meta device stands for a GPU: it too refuses to be mixed with the host."""
    objective = JointObjective(quality_weight=0.0, diversity=_OnTheHost())
    objective.terms = objective.terms[1:]
    masks_RN = torch.ones(3, 4, dtype=torch.bool, device="meta")
    ground = ground_set(unit_rows(4, 2, 0), 2)
    assert objective.term_values(masks_RN, ground).device.type == "meta"
