"""Progress stays readable: on a terminal, in a file, without colour, in ASCII, in 60 columns."""

from __future__ import annotations

import io

import numpy as np
import pytest

from netcl import nn, optim
from netcl.core.device import manager
from netcl.trainer import Progress, Trainer, progress

DATA = [(np.eye(4, dtype=np.float32), np.arange(4) % 2)] * 3


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "ascii"

    def isatty(self):
        return True


def shown(stream, style="auto", **options):
    model = nn.Linear(manager.default("cpu"), 4, 2)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), metrics=["accuracy", "top2"], callbacks=[Progress(style, stream)])
    trainer.fit(DATA, val=DATA, epochs=2, **options)
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = shown(io.StringIO()).splitlines()
    assert len(lines) == 2 and lines[0].startswith("epoch 1/2  loss ") and "val_accuracy" in lines[1] and "\x1b" not in lines[0]


def test_a_long_epoch_is_told_in_between(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", -1.0)
    assert "epoch 1/2, batch 2/3: loss " in shown(io.StringIO(), log_every=2)


@pytest.mark.parametrize("style", ["auto", "plain"])
def test_a_narrow_terminal(style, monkeypatch):
    pytest.importorskip("rich")
    for name, value in {"COLUMNS": "60", "LINES": "24", "NO_COLOR": "1", "TERM": "xterm", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    text = shown(Terminal(), style, log_every=1)
    lines = [part for line in text.replace("\r", "\n").splitlines() for part in [progress_text(line)]]
    assert text.isascii() and max(map(len, lines)) <= 60
    assert any(line.startswith("epoch 2/2  loss ") for line in lines) and "\x1b[3" not in text.replace("\x1b[?25", "")


def progress_text(line: str) -> str:
    """A line without the codes that move the cursor."""
    return "".join(part.partition("m")[2] if i and "m" in part else part.lstrip("[?0123456789;ABCDHJKhl") if i else part
                   for i, part in enumerate(line.split("\x1b")))  # fmt: skip


def test_off_says_nothing_and_nonsense_is_refused(monkeypatch):
    assert shown(io.StringIO(), "off") == ""
    with pytest.raises(ValueError, match=r"\[Progress\] style is auto, rich, plain or off; style='loud'"):
        Progress("loud")
    monkeypatch.setenv("NETCL_PROGRESS", "plain")
    assert Progress().style == "plain"
