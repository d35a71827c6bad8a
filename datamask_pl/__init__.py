"""Learns which samples of a pre-training corpus to keep: DATAMASK on PyTorch Lightning.

Names below are imported when they are first asked for, so that a command that needs no Lightning does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from datamask_pl._moved import install as _install_old_paths

if TYPE_CHECKING:
    from datamask_pl.callbacks.checkpoint import LogitsCheckpoint
    from datamask_pl.callbacks.mask_export import MaskExport
    from datamask_pl.data.module import FeatureDataModule
    from datamask_pl.learner.loop import learn_block
    from datamask_pl.learner.module import MaskLearner
    from datamask_pl.objectives import DiSF, FacilityLocation, Objective, PairwiseSimilarity
    from datamask_pl.objectives.ground_set import GroundSet

__version__ = "0.1.0"

_HOMES = {
    "DiSF": "objectives",
    "FacilityLocation": "objectives",
    "FeatureDataModule": "data.module",
    "GroundSet": "objectives.ground_set",
    "LogitsCheckpoint": "callbacks.checkpoint",
    "MaskExport": "callbacks.mask_export",
    "MaskLearner": "learner.module",
    "Objective": "objectives",
    "PairwiseSimilarity": "objectives",
    "learn_block": "learner.loop",
}

__all__ = [
    "DiSF",
    "FacilityLocation",
    "FeatureDataModule",
    "GroundSet",
    "LogitsCheckpoint",
    "MaskExport",
    "MaskLearner",
    "Objective",
    "PairwiseSimilarity",
    "__version__",
    "learn_block",
]

_install_old_paths()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
