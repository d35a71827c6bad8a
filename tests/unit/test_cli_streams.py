"""What cannot be shown or is not read ends no run."""

import io
import sys

from datamask_pl import cli
from datamask_pl.callbacks.progress import MaskProgressBar


def test_a_name_that_the_terminal_cannot_show_is_printed_with_escapes(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["cli.py", "report"])
    monkeypatch.setattr(cli, "_run", lambda *_, **__: print("größe"))
    cli.main()
    sys.stdout.flush()
    assert raw.getvalue() == b"gr\\xf6\\xdfe\n"


def test_the_bar_is_on_stderr(capsys):
    bar = MaskProgressBar().init_train_tqdm()
    bar.update()
    bar.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err
