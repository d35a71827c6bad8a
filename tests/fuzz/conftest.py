"""Every fuzz test is guarded."""

import faulthandler
import resource
from pathlib import Path

import pytest

from tests.fuzz.damage import NUM_INPUTS

MORE_BYTES = 4 << 30


@pytest.fixture(autouse=True)
def guarded():
    """A hang ends the process with a traceback; a footer that asks for terabytes gets an error, not the machine."""
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    faulthandler.dump_traceback_later(max(120, NUM_INPUTS // 10), exit=True)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MORE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    faulthandler.cancel_dump_traceback_later()
