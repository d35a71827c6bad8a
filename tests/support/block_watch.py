"""How many blocks are in memory whenever one is read."""

import gc
import weakref

from datamask_pl.data.reader import BlockReader


def watch_blocks(monkeypatch):
    """References to the blocks that are read, and how many of those before were alive at each: two growing lists."""
    blocks, num_alive = [], []
    read = BlockReader.read

    def spy(self, plan, index):
        gc.collect()
        num_alive.append(sum(reference() is not None for reference in blocks))
        block, bad_rows = read(self, plan, index)
        blocks.append(weakref.ref(block))
        return block, bad_rows

    monkeypatch.setattr(BlockReader, "read", spy)
    return blocks, num_alive
