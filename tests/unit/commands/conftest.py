"""What tests of commands that look at a run share."""

import shutil

import pytest

from tests.support.fits import run_folder


@pytest.fixture
def run(made, workplace):
    """A copy of the run that the module's fixture `made`, and of its shards, in the current folder."""
    shutil.copytree(made, workplace, dirs_exist_ok=True)
    return run_folder()
