"""``netcl chat`` and ``netcl serve``."""

from __future__ import annotations

import pytest

import netcl.serve
from netcl import models
from netcl.cli import main


@pytest.fixture
def typed(monkeypatch):
    """Feeds lines to ``input``; the end of them is the end of the input."""

    def feed(*lines):
        left = iter(lines)

        def read(prompt=""):
            print(prompt, end="")
            line = next(left, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)

    return feed


def answer_to(model, text, most):
    ids = model.tokenizer.encode(text)
    return model.tokenizer.decode(model.generate(ids, most))


def test_chat_keeps_the_conversation_until_it_is_reset(served_folder, host_model, typed, capsys):
    first = answer_to(host_model, "s:Brief;u:Hi;a:", 9)
    second = answer_to(host_model, f"s:Brief;u:Hi;a:{first};u:Why?;a:", 9)
    typed("Hi", "Why?", "", "/reset", "Hi", "/exit", "never")
    options = ["--system", "Brief", "--length", "9", "--temperature", "0", "--device", "cpu"]
    assert main(["chat", str(served_folder), *options]) == 0
    told = capsys.readouterr().out
    assert told.partition("\n")[2] == f"> {first}\n> {second}\n> > > {first}\n> "
    assert "\033" not in told
