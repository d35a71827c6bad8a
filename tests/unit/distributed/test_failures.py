import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from datamask_pl.distributed import failures
from datamask_pl.distributed.failures import FailureBoard

LONG_GONE = 2**22 - 1  # no process has this number on a machine with the default limit


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 4)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(failures, "PATIENCE_S", 1.0)
    monkeypatch.setattr(failures, "NOTICE_S", 0.3)


def boards(store, world_size):
    return [FailureBoard(store, rank, world_size, range(world_size)) for rank in range(world_size)]


def pretend(store, rank, pid, host=None):
    store.set(f"datamask-process-{rank}", json.dumps([host or socket.gethostname(), pid]))


class TestFind:
    def test_what_a_rank_posts_the_others_find(self, store):
        zero, one, two = boards(store, 3)
        one.post("RuntimeError: no more: memory")
        assert zero.find() == two.find() == "rank 1 ended: RuntimeError: no more: memory"

    def test_the_first_to_post_is_heard(self, store):
        zero, one, two = boards(store, 3)
        two.post("first")
        one.post("second")
        assert zero.find() == "rank 2 ended: first"

    def test_it_waits_for_a_rank_that_takes_a_moment_to_post(self, store):
        _, one, two = boards(store, 3)
        threading.Timer(0.5, lambda: two.post("late")).start()
        assert one.find() == "rank 2 ended: late"

    def test_a_process_that_is_gone_is_named(self, store):
        _, one, _ = boards(store, 3)
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        pretend(store, 2, process.pid)
        assert one.find() == "rank 2 was killed without reporting an error (out of memory?)"

    def test_so_is_one_that_waits_for_its_parent_to_notice(self, store):
        _, one, _ = boards(store, 3)
        process = subprocess.Popen([sys.executable, "-c", ""])
        pretend(store, 2, process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert "rank 2 was killed without reporting an error" in one.find()
        process.wait()

    def test_one_that_ended_because_of_another_is_not_named_in_its_place(self, store):
        _, one, two, _ = boards(store, 4)
        pretend(store, 3, LONG_GONE)
        assert "rank 3 was killed without reporting an error" in one.find()
        one.leave()
        pretend(store, 1, LONG_GONE)
        assert "rank 3 was killed without reporting an error" in two.find()

    def test_of_another_machine_nothing_is_known(self, store):
        _, one = boards(store, 2)
        pretend(store, 0, LONG_GONE, host="elsewhere")
        store.set("datamask-noticed-0", "")
        assert one.find() is None

    def test_a_rank_that_neither_failed_nor_noticed_did_not_answer(self, store):
        _, one, _ = boards(store, 3)
        store.set("datamask-noticed-0", "")
        assert one.find() == "rank 2 did not answer"

    def test_a_rank_of_another_group_need_not_answer(self, store):
        FailureBoard(store, 0, 4, [0, 1])
        two = FailureBoard(store, 2, 4, [2, 3])
        FailureBoard(store, 3, 4, [2, 3])
        store.set("datamask-noticed-3", "")
        assert two.find() is None

    def test_ranks_that_have_not_said_where_they_are_do_not_block_it(self, store):
        two = FailureBoard(store, 2, 4, [2])
        begun_s = time.monotonic()
        assert two.find() is None
        assert time.monotonic() - begun_s < 60

    def test_rank_0_stays_until_those_who_noticed_have_found_it(self, store, monkeypatch):
        monkeypatch.setattr(failures, "PATIENCE_S", 300.0)
        zero, one = boards(store, 2)
        one_found = []
        store.set("datamask-noticed-1", "")

        def search():
            time.sleep(0.6)
            one_found.append(one.find())
            one.leave()

        thread = threading.Thread(target=search)
        thread.start()
        zero.post("it is me")
        zero.leave()
        assert one_found == ["rank 0 ended: it is me"]
        thread.join()

    def test_but_not_for_one_that_does_not_notice(self, store, monkeypatch):
        monkeypatch.setattr(failures, "PATIENCE_S", 300.0)
        zero, _ = boards(store, 2)
        begun_s = time.monotonic()
        zero.leave()
        assert time.monotonic() - begun_s < 150


class TestFinish:
    def test_rank_0_and_its_group_wait_for_all(self, store):
        boards_ = [FailureBoard(store, rank, 4, [rank // 2 * 2, rank // 2 * 2 + 1]) for rank in range(4)]
        ended = []
        threads = [
            threading.Thread(target=lambda board=board: ended.append((board.finish(), board.rank)))
            for board in boards_[:2]
        ]
        for thread in threads:
            thread.start()
        assert boards_[2].finish() is None  # the others do not wait
        time.sleep(0.5)
        assert not ended
        assert boards_[3].finish() is None
        for thread in threads:
            thread.join(300)
        assert sorted(ended, key=str) == [(None, 0), (None, 1)]

    def test_the_process_of_a_rank_that_has_done_its_part_may_be_gone(self, store):
        zero, one, two = (FailureBoard(store, rank, 3, [rank]) for rank in range(3))
        one.finish()
        pretend(store, 1, LONG_GONE)
        threading.Timer(0.5, two.finish).start()
        assert zero.finish() is None

    def test_a_rank_that_is_lost_is_named(self, store):
        zero, _ = (FailureBoard(store, rank, 2, [rank]) for rank in range(2))
        pretend(store, 1, LONG_GONE)
        assert "rank 1 was killed without reporting an error" in zero.finish()

    def test_so_is_one_that_failed(self, store):
        zero, one = (FailureBoard(store, rank, 2, [rank]) for rank in range(2))
        threading.Timer(0.3, lambda: one.post("alas")).start()
        assert zero.finish() == "rank 1 ended: alas"


def hold_store(port_queue, may_end):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port_queue.put(store.port)
    may_end.wait(300)


def test_without_the_process_that_holds_the_store_rank_0_is_named_and_nothing_raises():
    context = multiprocessing.get_context("spawn")
    ports, may_end = context.Queue(), context.Event()
    holder = context.Process(target=hold_store, args=(ports, may_end))
    holder.start()
    store = dist.TCPStore("127.0.0.1", ports.get(timeout=300), timeout=timedelta(seconds=60))
    one = FailureBoard(store, 1, 2, [0, 1])
    holder.kill()
    holder.join()
    assert one.find() == "rank 0, which hosts the rendezvous store, exited"
    assert one.finish() == "rank 0, which hosts the rendezvous store, exited"
    one.post("nobody hears it")
