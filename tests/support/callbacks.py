"""A callback of a user's own, which a test names by class path."""

import json
import signal
import time
from pathlib import Path

from lightning.pytorch.callbacks import Callback


class CountsSteps(Callback):
    """Writes how many steps it was told of.

    Args:
        path: file to write.
    """

    def __init__(self, *, path: str) -> None:
        self.path = path
        self.num_steps = 0

    def on_train_batch_end(self, *_) -> None:
        self.num_steps += 1

    def on_train_end(self, *_) -> None:
        Path(self.path).write_text(str(self.num_steps))


class StopsAfter(Callback):
    """Asks the trainer to stop.

    Args:
        num_steps: steps of the run after which it does.
    """

    def __init__(self, *, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.num_steps:
            trainer.should_stop = True


class Signals(Callback):
    """Sends a signal to its own process.

    Args:
        name: of the signal.
        after: steps of the run after which it does.
    """

    def __init__(self, *, name: str, after: int) -> None:
        self.number = signal.Signals[name]
        self.after = after

    @staticmethod
    def config(name: str, *, after: int) -> str:
        return json.dumps(
            {"class_path": "tests.support.callbacks.Signals", "init_args": {"name": name, "after": after}}
        )

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == self.after - 1:
            signal.raise_signal(self.number)


class Sleeps(Callback):
    """Makes steps slow.

    Args:
        seconds: how long to sleep after each.
    """

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_) -> None:
        time.sleep(self.seconds)


class AltersALogit(Callback):
    """Moves the first logit on rank 1 alone, as a fault of its hardware would.

    Args:
        after: steps of the run after which it does.
    """

    def __init__(self, *, after: int) -> None:
        self.after = after

    @staticmethod
    def config(*, after: int) -> str:
        return json.dumps({"class_path": "tests.support.callbacks.AltersALogit", "init_args": {"after": after}})

    def on_train_batch_start(self, trainer, pl_module, *_) -> None:
        if trainer.global_step == self.after and trainer.global_rank == 1:
            pl_module.policy.logits.data[0] += 0.01
