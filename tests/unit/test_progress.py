import types

from lightning.pytorch.callbacks import TQDMProgressBar

from datamask_pl.callbacks import progress
from datamask_pl.callbacks.progress import MaskProgressBar


def test_the_bar_is_drawn_ten_times_a_second_at_most_and_when_it_is_full(monkeypatch):
    """Drawing it takes longer than a small step."""
    now, drawn = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(TQDMProgressBar, "on_train_batch_end", lambda *args: drawn.append(args[-1]))
    monkeypatch.setattr(MaskProgressBar, "total_train_batches", 200)
    bar = MaskProgressBar()
    for step in range(200):
        bar.on_train_batch_end(types.SimpleNamespace(), types.SimpleNamespace(), None, None, step)
        now[0] += 0.015625
    assert drawn == [*range(0, 200, 7), 199]
