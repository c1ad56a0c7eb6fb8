"""On a terminal of 60 columns every command stays readable; an encoding without our signs is no reason to fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from netcl.cli import command

pty = pytest.importorskip("pty")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def on_terminal(*arguments: str, columns: int = 60, **settings: str) -> tuple[int, str]:
    """The status of a command and what it wrote on a terminal of so many columns."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm", **settings}
    process = subprocess.Popen(
        [sys.executable, "-m", "netcl", *arguments], stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        written += part
        if not part:
            break
    os.close(leader)
    return process.wait(timeout=60), written.decode()


def lines_of(text: str) -> list[str]:
    return [CODES.sub("", part) for line in text.splitlines() for part in line.split("\r")]


BENCH = ["bench", "--device", "cpu", "--cases", "^sum 2.10", "--repeats", "1"]


@pytest.mark.parametrize("arguments", [["env"], ["devices"], ["doctor"], ["ops"], ["--help"], BENCH], ids=lambda words: words[0])
def test_lines_fit(arguments):
    status, text = on_terminal(*arguments)
    long = [line for line in lines_of(text) if len(line) > 60 and " " in line.strip()]
    assert status in (0, 1) and long == [] and "Traceback" not in text


def test_a_run_on_a_terminal(tmp_path):
    options = ["--data", "synthetic", "--data-options", "samples=256", "--model", "mlp", "--epochs", "2", "--log-every", "1"]
    status, text = on_terminal("train", *options, "--device", "cpu", "--run", str(tmp_path), NO_COLOR="1")
    lines = lines_of(text)
    assert status == 0 and "\x1b[3" not in text.replace("\x1b[?", "") and any(line.startswith("epoch 2/2  loss") for line in lines)
    assert max(len(line) for line in lines if str(tmp_path)[:8] not in line) <= 60
    assert any(re.match(r"epoch 1/2\s+\d+/\d  training", line) for line in lines)  # the bar's line moved


def test_an_encoding_that_lacks_a_sign(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "NETCL_CACHE_DIR": str(tmp_path / "café")}
    done = subprocess.run([sys.executable, "-m", "netcl", "cache", "info"], capture_output=True, env=environment)
    assert done.returncode == 0 and b"caf?" in done.stdout and done.stderr == b""


def test_the_widest_column_gives_way(monkeypatch):
    monkeypatch.setattr(command, "terminal_columns", lambda: 24)
    text = command.table(("name", "meaning"), [("short", "several words that do not fit")])
    assert text == "name   meaning\nshort  several words\n       that do not fit"
    rows = [("0:0", "Oclgrind Simulator", "0.1 GB"), ("cpu", "NumPy", "")]
    assert command.table(("selector", "device", "memory"), rows, 2) == (
        "  selector  0:0\n  device    Oclgrind\n      Simulator\n  memory    0.1 GB\n\n  selector  cpu\n  device    NumPy"
    )
    assert command._broken("  one two three four", 12) == "  one two\n      three\n      four"
