"""What the fuzz tests share: how many inputs there are, how bytes are damaged, which errors may come of it."""

import os
import warnings
from contextlib import contextmanager, suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from datamask_pl.errors import DatamaskError
from tests.support.shards import find_pages

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS") or 4 * settings().max_examples)


def inputs(share):
    """Hypothesis' settings for a share of all inputs."""
    return settings(
        max_examples=max(1, int(NUM_INPUTS * share)),
        deadline=None,
        database=None,
        derandomize=NUM_INPUTS < 1000,  # make test is the same every time
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def ours():
    """Lets errors of ours pass, and warnings; any other error is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(DatamaskError):
            yield


place = st.floats(0, 1, exclude_max=True)
damage = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), place, st.integers(0, 7)),
        st.tuples(st.just("flip"), place.map(lambda share: 1 - share / 20), st.integers(0, 7)),
        st.tuples(st.just("page"), place, st.integers(0, 7)),
        st.tuples(st.just("set"), place, st.sampled_from([0, 1, 127, 128, 255])),
        st.tuples(st.just("cut"), place, st.integers(0, 100)),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("end"), place, place),
        st.tuples(st.just("copy"), place, place),
        st.tuples(st.just("footer"), st.just(0.0), st.just(0)),
    ),
    min_size=1,
    max_size=3,
)


def spoil(content, changes, other):
    """Content after some changes; `page` flips a bit of a page's header, `footer` takes the one of another file."""
    for kind, share, value in changes:
        position = min(int(share * len(content)), len(content) - 1)
        if not content:
            return content
        head, byte, tail = content[:position], content[position], content[position + 1 :]
        if kind == "flip":
            content = head + bytes([byte ^ (1 << value)]) + tail
        elif kind == "page":
            headers = [start + offset for start in find_pages(content) for offset in range(8)]
            if headers:
                content = spoil(
                    content, [("flip", (headers[int(share * len(headers))] + 0.5) / len(content), value)], b""
                )
        elif kind == "set":
            content = head + bytes([value]) + tail
        elif kind == "cut":
            content = head + tail[value:]
        elif kind == "insert":
            content = head + value + bytes([byte]) + tail
        elif kind == "end":
            content = head
        elif kind == "copy":
            start = int(value * len(content))
            content = head + content[start : start + 64] + tail[63:]
        elif kind == "footer":
            size = int.from_bytes(other[-8:-4], "little") + 8
            content = content[: -int.from_bytes(content[-8:-4], "little") - 8] + other[-size:]
    return content


class Known:
    """What a fixture knows, with a short repr."""

    def __init__(self, **entries):
        self.__dict__.update(entries)


def is_same(column, other):
    """Equal, or of another type: a footer has no checksum, and whoever joins by id compares the types."""
    return column.type != other.type or column.equals(other)
