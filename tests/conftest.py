"""What all tests share."""

import gc
import signal

import pytest
import torch
from hypothesis import settings

from tests.support.forked_ranks import Ranks

# make test-all asks for the thorough one
settings.register_profile("fast", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=100, deadline=None)
settings.load_profile("fast")


def pytest_collection_finish():
    """A fit collects garbage after each block; what is imported by now need not be searched again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The number of threads decides on the last bits of a product, and small products are faster on one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """A variable of the developer's shell is an option of `fit`."""
    import os

    for name in [name for name in os.environ if name.startswith("DATAMASK_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_rank_left_over():
    """Ends what a test that failed has left."""
    yield
    Ranks.kill_all()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A shell that starts the suite in the background has it ignore SIGINT, and every process that a test starts with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
