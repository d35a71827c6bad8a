"""Module paths of 0.1 before its folders were made: configs and custom objectives that name one still work."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PATHS = {
    "datamask_pl.datamodule": "datamask_pl.data.module",
    "datamask_pl.fit": "datamask_pl.commands.fit",
    "datamask_pl.ground_set": "datamask_pl.objectives.ground_set",
    "datamask_pl.joint_objective": "datamask_pl.objectives.joint",
    "datamask_pl.module": "datamask_pl.learner.module",
    "datamask_pl.objective": "datamask_pl.objectives.base",
    "datamask_pl.run_logger": "datamask_pl.callbacks.logger",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the module of today under the path of before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in PATHS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(PATHS[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run under its own path; it keeps the specification of that path."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Makes the old paths importable. Behind all other finders, so that a module of that name would win."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
