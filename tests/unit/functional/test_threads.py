import ctypes
import sys
import threading

import pytest
import torch

from datamask_pl.functional.threads import give_back_memory, one_thread_each

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("platform", "functions", "expected"),
    [("linux", ["malloc_trim"], [0]), ("linux", [], []), ("darwin", ["malloc_trim"], [])],
)
def test_memory_is_given_back_where_glibc_can(monkeypatch, platform, functions, expected):
    trimmed, asked = [], []

    class Library:
        def __init__(self, name):
            asked.append(name)
            for function in functions:
                setattr(self, function, trimmed.append)

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    give_back_memory()
    assert trimmed == expected
    assert asked == ([None] if platform == "linux" else [])


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def whose(*arguments):
    return threading.get_ident(), torch.get_num_threads(), arguments


@pytest.mark.usefixtures("three_threads")
def test_tasks_run_side_by_side_on_one_thread_each_and_give_the_threads_back():
    meeting = threading.Barrier(3)  # none goes on before all are there
    with one_thread_each(CPU) as start:
        waiting = [start(lambda place: (meeting.wait(30), whose(place))[1], place) for place in range(3)]
        results = [wait() for wait in waiting]
        again = start(whose, 1, 2)()
    assert [arguments for _, _, arguments in results] == [(0,), (1,), (2,)]
    assert {num_threads for _, num_threads, _ in results} == {1}
    assert len({ident for ident, _, _ in results} - {threading.get_ident()}) == 3
    assert again[1:] == (1, (1, 2))
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_what_was_not_begun_when_the_body_fails_is_never_done():
    release, begun = threading.Event(), []

    def hold(place):
        begun.append(place)
        release.wait(30)

    def fail():
        with one_thread_each(CPU) as start:
            for place in range(9):
                start(hold, place)
            threading.Timer(0.05, release.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(begun) < 9
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("where", "num_threads"), [(CPU, 1), (GPU, 3)])
def test_on_a_gpu_and_on_one_thread_tasks_run_where_they_are_started(where, num_threads):
    torch.set_num_threads(num_threads)
    try:
        with one_thread_each(where) as start:
            done = []
            wait = start(lambda place: done.append(place) or whose(place), 7)
            assert done == [7]
            assert wait() == (threading.get_ident(), num_threads, (7,))
            assert done == [7]
    finally:
        torch.set_num_threads(1)
