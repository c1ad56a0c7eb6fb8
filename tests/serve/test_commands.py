"""``netcl chat`` and ``netcl serve``."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys

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


def test_chat_keeps_the_conversation_until_it_is_reset(served_folder, host_model, typed, capsys):
    first = host_model.generate("s:Brief;u:Hi;a:", 9)
    second = host_model.generate(f"s:Brief;u:Hi;a:{first};u:Why?;a:", 9)
    typed("Hi", "Why?", "", "/reset", "Hi", "/exit", "never")
    options = ["--system", "Brief", "--length", "9", "--temperature", "0", "--device", "cpu"]
    assert main(["chat", str(served_folder), *options]) == 0
    told = capsys.readouterr().out
    assert told.partition("\n")[2] == f"> {first}\n> {second}\n> > > {first}\n> "
    assert "\033" not in told


def test_chat_on_a_terminal_has_colors_and_follows_its_seed(served_folder, typed, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = ["chat", str(served_folder), "--length", "9", "--temperature", "1.5", "--seed", "3", "--device", "cpu"]
    told = []
    for _ in range(2):
        typed("Hi", "Hi")
        assert main(command) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "\033[36m" in told[0]
    monkeypatch.setenv("NO_COLOR", "1")
    typed("Hi")
    assert main(command) == 0 and "\033" not in capsys.readouterr().out


def test_an_interrupt_stops_an_answer_and_not_the_chat(served_folder, host_model, typed, capsys, monkeypatch):
    answers = {text: host_model.generate(f"u:{text};a:", 20) for text in ("Hi", "Why?", "Hello", "one two", "#")}
    asked, whole = max(answers.items(), key=lambda row: len(row[1]))
    assert len(whole) > 4
    add, count = models.TextStream.add, []

    def interrupted(self, token):
        count.append(token)
        if len(count) == 4:
            signal.raise_signal(signal.SIGINT)
        return add(self, token)

    monkeypatch.setattr(models.TextStream, "add", interrupted)
    typed(asked, "/reset", asked, "/exit")
    assert main(["chat", str(served_folder), "--length", "20", "--temperature", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.partition("\n")[2] == f"> {whole[:4]}\n> > {whole}\n> "


def test_a_model_without_a_template_is_told(served_folder, typed, tmp_path, capsys):
    place = tmp_path / "plain"
    shutil.copytree(served_folder, place)
    (place / "tokenizer_config.json").unlink()
    typed("Hi")
    assert main(["chat", str(place), "--device", "cpu"]) == 1
    assert "the model has no chat template" in capsys.readouterr().err


def test_serve_is_local_by_default_and_warns_elsewhere(served_folder, capsys, monkeypatch):
    seen = []

    def run_server(app, host, port, connections, grace, ready):
        seen.append((host, port, [part.kwargs.get("allowed_hosts") or part.kwargs["key"] for part in app.user_middleware]))
        ready(1234)
        return 0

    monkeypatch.setattr(netcl.serve, "run_server", run_server)
    command = ["serve", str(served_folder), "--device", "cpu"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert told.out == "tiny: http://127.0.0.1:1234\n" and told.err == ""
    assert main([*command, "--host", "0.0.0.0", "--port", "80"]) == 0
    assert "warning: everybody who reaches 0.0.0.0" in capsys.readouterr().err
    assert main([*command, "--host", "0.0.0.0", "--api-key", ""]) == 1
    assert "--api-key must not be empty" in capsys.readouterr().err
    monkeypatch.setenv("NETCL_API_KEY", "secret")
    assert main([*command, "--host", "0.0.0.0"]) == 0 and capsys.readouterr().err == ""
    assert seen == [
        ("127.0.0.1", 8080, [list(netcl.serve.app.LOOPBACK), None]), ("0.0.0.0", 80, [["*"], None]), ("0.0.0.0", 8080, [["*"], "secret"]),
    ]  # fmt: skip


def test_a_server_answers_until_it_is_told_to_end(served_folder):
    """A process with a free port: its first line is printed once it takes requests."""
    command = [sys.executable, "-m", "netcl", "serve", str(served_folder), "--port", "0", "--device", "cpu", "--max-batch", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            body = json.dumps({"prompt": "Hello", "max_tokens": 3, "temperature": 0})
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
        finally:
            server.terminate()
    assert server.returncode == 143 and answer["usage"]["completion_tokens"] == 3
