"""``netcl train``, ``report``, ``generate`` and ``trace``: a folder that holds a run, and what is made of it."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import netcl.vision.models
from netcl import cli
from netcl.core.device import manager
from netcl.data import datasets
from netcl.io import checkpoints, load_model
from netcl.trainer.recipe import MODELS, OPTIMIZERS, Recipe, load_data, make_model, make_trainer, read_recipe
from netcl.trainer.run import _Rates

DIGITS = ["train", "--data", "digits", "--model", "mlp", "--model-options", "hidden=[32]", "--device", "cpu", "--lr", "0.03"]


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on the bundled digits, two epochs of a small perceptron."""
    folder = tmp_path_factory.mktemp("digits")
    assert cli.main([*DIGITS, "--epochs", "2", "--run", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "song.txt").write_text("the quick fox\n" * 50)
    size = ["--model-options", "n_layer=1", "n_head=2", "n_embd=16", "block_size=8", "--batch-size", "32"]
    options = [*size, "--epochs", "10", "--lr", "0.03", "--device", "cpu"]
    assert cli.main(["train", "--data", "text", "--root", str(folder / "song.txt"), "--model", "gpt", *options, "--run", str(folder)]) == 0
    return folder


def test_a_run_leaves_everything_in_its_folder(digits):
    names = {path.name for path in digits.iterdir()}
    assert names == {
        "config.json",
        "log.jsonl",
        "log.csv",
        "checkpoints",
        "model.netcl",
        "results.json",
        "samples.npz",
        "profile.json",
        "report.html",
    }
    results = json.loads((digits / "results.json").read_text())
    with (digits / "log.csv").open(newline="") as file:
        losses = [float(row["val_loss"]) for row in csv.DictReader(file)]
    assert results["test"]["accuracy"] > 0.8
    assert results["best"] == {"epoch": 1 + losses.index(min(losses)), "of": 2, "by": "val_loss", "value": pytest.approx(min(losses))}
    assert [path.name for path in checkpoints(digits / "checkpoints")] == ["step-000020.netcl", "step-000040.netcl"]


def test_the_model_file_is_the_model_of_the_results(digits):
    _, test = datasets.digits()
    x, y = test.arrays
    chosen = load_model(digits / "model.netcl", "cpu")(x).to_host().argmax(1)
    results = json.loads((digits / "results.json").read_text())
    assert (chosen == y).mean() == pytest.approx(results["test"]["accuracy"])
    with np.load(digits / "samples.npz") as kept:
        assert kept["confusion"].sum() == len(y) and np.trace(kept["confusion"]) == (chosen == y).sum()
        assert (kept["labels"] != kept["chosen"])[: (chosen != y).sum()].all()  # those it gets wrong come first


def test_a_run_goes_on_where_it_stopped(digits, tmp_path, capsys):
    folder = tmp_path / "again"
    shutil.copytree(digits, folder)
    status, _, err = run(capsys, "train", folder, "--epochs", 3, "--run", folder, "--resume", "--device", "cpu")
    assert status == 0 and "epoch 3/3" in err and "epoch 2/3" not in err
    assert json.loads((folder / "config.json").read_text())["model_options"] == {"hidden": [32]}
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    assert epochs[2]["val_loss"] < epochs[1]["val_loss"]  # the first schedule had come to its end: it was made for two epochs


@pytest.mark.fault("run in a used folder", "without `--resume` or `--overwrite`", "refused")
def test_a_used_folder_needs_a_decision(digits, tmp_path, capsys):
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    words = ["train", tmp_path, "--epochs", 1, "--run", tmp_path, "--device", "cpu"]
    status, _, err = run(capsys, *words)
    assert status == 1 and err.startswith("[ModelCheckpoint] the folder of a new run must not hold the checkpoints of another run")
    assert "--resume" in err and "--overwrite" in err and len(err.splitlines()) == 1
    assert (tmp_path / "log.jsonl").read_bytes() == (digits / "log.jsonl").read_bytes()
    assert run(capsys, *words, "--overwrite")[0] == 0
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000020.netcl"]
    with pytest.raises(SystemExit):
        run(capsys, *words, "--overwrite", "--resume")


def test_what_is_given_to_a_resumed_run_counts(digits):
    """The learning rate and the decay of its recipe, and not those of the checkpoint."""
    recipe = Recipe().changed({**read_recipe(digits / "config.json"), "schedule": "constant", "lr": 0.5, "weight_decay": 0.25, "ema": 0.5})
    data = load_data(recipe)
    model = make_model(recipe, data, manager.default("cpu"))
    trainer = make_trainer(recipe, model, 1, data, [_Rates()])
    for callback in trainer.callbacks.callbacks:
        callback.set_trainer(trainer)
    trainer.ema.decay = 0.0
    trainer.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)  # as a checkpoint of another recipe would
    trainer.callbacks("on_train_begin", {})
    trainer.callbacks("close")
    assert [trainer.optimizer.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.5, 0.25]
    assert trainer.ema.decay == 0.5


@pytest.mark.parametrize("options", [["--batch-size", "32"], ["--optimizer", "sgd"]], ids=" ".join)
@pytest.mark.fault("resume with settings that do not fit", "another optimizer or batch size", "refused; the run is unchanged")
def test_a_run_that_cannot_go_on_so_stays_as_it_was(digits, tmp_path, capsys, options):
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    status, _, err = run(capsys, "train", tmp_path, *options, "--epochs", 3, "--run", tmp_path, "--resume", "--device", "cpu")
    assert status == 1 and err.startswith("[fit] the checkpoint must fit this trainer: [") and len(err.splitlines()) == 1
    assert (tmp_path / "config.json").read_text() == (digits / "config.json").read_text()


@pytest.mark.slow
def test_the_demo_reads_digits(tmp_path, capsys):
    """What ``make demo`` runs, for fewer epochs."""
    assert run(capsys, "train", "--data", "digits", "--model", "cnn", "--epochs", 2, "--device", "cpu", "--run", tmp_path)[0] == 0
    assert json.loads((tmp_path / "results.json").read_text())["test"]["accuracy"] >= 0.9


class Page(HTMLParser):
    """Counts the tags of a page and collects what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "data") and not value.startswith("data:")]
        self.open += [] if tag in ("meta", "img", "br") else [tag]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(digits):
    text = (digits / "report.html").read_text()
    page = Page(text)
    assert page.fetched == [] and "@import" not in text and "url(" not in text and page.open == []
    assert page.tags.count("svg") == 6 and page.tags.count("img") == 24 and "script" not in page.tags
    assert text.count("<td") >= 100 and 'class="kernels"' in text


def test_report_writes_it_again_elsewhere(digits, tmp_path, capsys):
    status, out, _ = run(capsys, "report", digits, "--out", tmp_path / "page.html")
    assert status == 0 and out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == (digits / "report.html").read_text()


DEEP = "[" * 100_000
DAMAGE = {
    "config.json": ["", "\xff", DEEP, '{"a": ' * 5000, "3", '"ab"'],
    "log.jsonl": ["\xff", DEEP, "3", '{"kind": "epoch", "step": 1}', '{"kind": "step", "step": 1, "loss": "x"}', '[1]\n{"kind": 3}'],
    "results.json": ["", "{}", "[]", '{"environment": 3, "classes": 3}', DEEP, '{"environment": {}, "classes": [], "test": {}}'],
    "samples.npz": ["", "PK\x05\x06", "PK\x03\x04 and more", "\x93NUMPY"],
    "profile.json": ["{}", '{"rows": 3}', '{"rows": [3]}', '{"rows": [{}]}'],
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.fault("report of damaged files", "run files cut and replaced", "one line that names the file")
def test_a_report_of_damaged_files_names_the_file(digits, tmp_path, capsys, name):
    for i, content in enumerate(DAMAGE[name]):
        folder = tmp_path / str(i)
        shutil.copytree(digits, folder)
        (folder / name).write_bytes(content.encode("latin1"))
        status, _, err = run(capsys, "report", folder)
        told = status == 1 and name in err and "damaged" in err and len(err.splitlines()) == 1
        left_out = status == 0 and name == "log.jsonl"  # rows that are not a run's are left out
        assert told or left_out, (content[:40], status, err)


@pytest.mark.parametrize("content", [b"\xff", DEEP.encode(), b"a = " + DEEP.encode()])
@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.fault("recipe that cannot be read", "deep nesting, not UTF-8", "one line")
def test_a_recipe_that_cannot_be_read_is_told_in_a_line(tmp_path, capsys, content, suffix):
    (tmp_path / f"recipe.{suffix}").write_bytes(content)
    status, _, err = run(capsys, "train", tmp_path / f"recipe.{suffix}", "--device", "cpu")
    assert status == 1 and err.startswith("[recipe] the file cannot be read") and len(err.splitlines()) == 1


def test_an_unfinished_run_has_a_page_too(digits, tmp_path, capsys):
    for name in ("config.json", "log.jsonl"):
        shutil.copy(digits / name, tmp_path)
    assert run(capsys, "report", tmp_path)[0] == 0
    page = Page((tmp_path / "report.html").read_text())
    assert page.open == [] and page.tags.count("svg") == 6 and "img" not in page.tags


def chromium() -> str | None:
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@pytest.mark.skipif(chromium() is None, reason="Chromium is not installed")
def test_a_browser_draws_curves_and_tables(digits, tmp_path):
    """The measures are taken by the browser: what it laid out with a size is what is seen."""
    probe = """<script>
      const size = e => { const r = e.getBoundingClientRect(); return Math.min(r.width, r.height); };
      const count = (what, least) => [...document.querySelectorAll(what)].filter(e => size(e) > least).length;
      const told = {lines: [...document.querySelectorAll('svg polyline')].filter(l => l.getTotalLength() > 20).length,
                    charts: count('svg.chart', 100), cells: count('table.confusion td', 5), kernels: count('table.kernels', 10),
                    images: [...document.images].filter(i => i.complete && i.naturalWidth == 8).length};
      document.body.insertAdjacentHTML('beforeend', '<pre id="told">' + JSON.stringify(told) + '</pre>');
    </script>"""
    page = tmp_path / "page.html"
    page.write_text((digits / "report.html").read_text().replace("</body>", probe + "</body>"))
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    told = json.loads(re.search(r'<pre id="told">(\{.*?\})</pre>', dom)[1])
    assert told == {"lines": 8, "charts": 6, "cells": 100, "kernels": 1, "images": 24}


def test_text_is_learnt_and_written(text_run, capsys):
    status, out, _ = run(capsys, "generate", text_run, "--prompt", "the quick ", "--length", 20, "--temperature", 0, "--device", "cpu")
    assert status == 0 and out.startswith("the quick fox\nthe quick fox")
    assert "quick" in json.loads((text_run / "results.json").read_text())["text"]
    again = [run(capsys, "generate", text_run, "--length", 30, "--seed", 5, "--device", "cpu")[1] for _ in range(2)]
    assert again[0] == again[1] and len(again[0]) == 32


def test_a_toml_file_is_a_recipe_and_options_come_on_top(tmp_path, capsys):
    pytest.importorskip("tomllib")
    file = tmp_path / "recipe.toml"
    file.write_text('epochs = 5\nlr = 1\n[data]\nname = "synthetic"\nsamples = 64\n[model]\nname = "mlp"\nhidden = [8]\n')
    options = ["--model-options", "hidden=[8]", "--model-options", "dropout=0.5"]
    status, _, _ = run(capsys, "train", file, "--epochs", 1, "--device", "cpu", *options, "--run", tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["model_options"] == {"hidden": [8], "dropout": 0.5}
    assert status == 0 and (config["epochs"], config["lr"], config["data_options"]) == (1, 1.0, {"samples": 64})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--model", "cnnn"], "[recipe] unknown model; model='cnnn'; did you mean cnn? known are cnn, mlp"),
        (["train", "--data", "digit"], "[recipe] unknown data; data='digit'; known are digits"),
        (["train", "--model", "gpt"], "[recipe] the model must be gpt for text, and another one for other data"),
        (["train", "--data", "text", "--model", "gpt"], "[recipe] data 'text' requires a file"),
        (["train", "--model", "mlp", "--model-options", "depth=3"], "[recipe] the model cannot be made: "),
        (["train", "--model", "mlp", "--model-options", "hidden"], "[recipe] an option of the data or the model must be NAME=VALUE"),
        (["train", "--epochs", "0"], "[recipe] epochs must be at least 1; epochs=0"),
        (["train", "--ema", "1"], "[recipe] ema must be at least 0 and below 1; ema=1.0"),
        (["train", "--lr", "nan"], "[recipe] lr must be at least 0 and finite; lr=nan"),
        (["train", "--mixed-precision", "float8"], "[recipe] mixed_precision must be float16, bfloat16 or empty; mixed_precision='float8'"),
        (["train", "--model-options", "depth=3"], "[recipe] the model cannot be made: cnn() got an unexpected keyword argument 'depth'"),
        (["train", "--model", "resnet18", "--model-options", "width=0"], "[conv2d] the numbers of channels and filters"),
        (["train", "--find-lr", "--lr", "1"], "[train] --find-lr requires a new run of one process, without --lr"),
        (["generate", ".", "once", "--prompt", "twice"], "[generate] the prompt must be given once"),
        (["train", "--distributed", "3"], "[recipe] batch_size must be a multiple of the number of ranks; batch_size=64, ranks=3"),
        (["train", "kinds.json"], "[recipe] epochs must be a whole number; value='x'"),
        (["trace"], "[trace] the NumPy backend has no kernels to trace; name an OpenCL device: --device cl"),
        (["train", "nowhere.json"], "[train] No such file or directory; file=nowhere.json"),
        (["train", "--run", "a_file"], "[train] File exists; file=a_file"),
        (["report", "."], "[run] the folder must have a file config.json"),
        (["report", "damaged"], "[run] config.json must be valid JSON: "),
        (["generate", "."], "[generate] No such file or directory; file=config.json"),
        (["generate", ".", "--top-k", "0"], "[generate] temperature must be at least 0, top_k an integer from 1"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    (tmp_path / "kinds.json").write_text('{"epochs": "x"}')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text("[1")
    status, _, err = run(capsys, *arguments, *(["--device", "cpu"] if arguments[0] != "report" else []))
    assert status == 1 and words in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "mnist", "--root", "empty", "--model", "mlp"], "data must have samples to train and to test with; train=0, test=0"),
        (["--model", "vit", "--model-options", "patch_size=0"], "the model cannot be made: "),
        (
            ["--data", "text", "--root", "x", "--model", "gpt", "--data-options", "block=x"],
            "must be a whole number of at least 1; block='x'",
        ),
        (["--data", "text", "--root", "x", "--model", "gpt", "--model-options", "block_size=0"], "block=0"),
        (["--data", "synthetic", "--data-options", "shape=[3,999999999999999]"], "the data cannot be read: Unable to allocate"),
        (["--data", "synthetic", "--data-options", f"shape={DEEP}"], "the data cannot be read"),
    ],
    ids=["no images", "patch 0", "block x", "block 0", "huge", "deep"],
)
@pytest.mark.fault("values that cannot be", "no images, patches of 0, huge and deep shapes", "one line, status 1")
def test_a_value_that_cannot_be_is_told_in_a_line(tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "t10k"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        (tmp_path / f"empty/{part}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + bytes(4) + bytes([0, 0, 0, 28]) * 2)
        (tmp_path / f"empty/{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + bytes(4))
    status, _, err = run(capsys, "train", *words, "--device", "cpu")
    assert status == 1 and err.startswith("[recipe] ") and told in err and len(err.splitlines()) == 1


def test_the_help_says_what_every_setting_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for item in dataclasses.fields(Recipe):
        assert f"--{item.name.replace('_', '-')}" in text and item.metadata["doc"] in text
    assert "order and augmentation; default: 0" in text
    zoo = set(netcl.vision.models.list_models())  # which the text names as a whole
    for known, name in ((MODELS.keys() - zoo, "model"), (OPTIMIZERS, "optimizer"), (datasets.DATASET_NAMES, "data")):
        doc = next(item.metadata["doc"] for item in dataclasses.fields(Recipe) if item.name == name)
        assert set(re.findall(r"[\w-]+", doc)) >= set(known)


def test_a_setting_that_does_not_exist_is_named(tmp_path, capsys):
    (tmp_path / "recipe.json").write_text('{"epoch": 3}')
    status, _, err = run(capsys, "train", tmp_path / "recipe.json")
    assert status == 1 and err == "[recipe] unknown setting 'epoch'; did you mean epochs?\n"


def test_output_without_a_terminal_is_plain(tmp_path):
    settings = {"NO_COLOR": "1", "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    command = [sys.executable, "-m", "netcl", *DIGITS, "--epochs", "1", "--run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **settings})
    text = (done.stdout + done.stderr).decode("ascii")
    assert done.returncode == 0 and "\x1b" not in text and "epoch 1/1  loss" in text and "accuracy  0." in text


@pytest.mark.parametrize(("lines", "unbuffered"), [(0, "1"), (1, "")])
@pytest.mark.fault("reader of the output leaves", "`| head -1`", "the run ends and saves everything, status 141")
def test_a_training_goes_on_without_its_reader(tmp_path, lines, unbuffered):
    """``netcl train ... 2>&1 | head -1``: everything is written, and the lost output has a status of its own."""
    command = [sys.executable, "-m", "netcl", *DIGITS, "--epochs", "2", "--run", str(tmp_path)]
    settings = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=settings)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    assert process.wait() == cli.BROKEN_PIPE
    assert {"model.netcl", "results.json", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    assert len(checkpoints(tmp_path / "checkpoints")) == 2


def test_a_broken_pipe_of_another_is_an_error(capsys, monkeypatch):
    def write_report(*given):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("netcl.trainer.report_html.write_report", write_report)
    status, _, err = run(capsys, "report", "x")
    assert status == 1 and "Broken pipe" in err


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.fault("closed stdout or stderr", "`>&-`", "the run ends and writes its report")
def test_closed_streams_change_nothing(tmp_path, closed):
    words = [sys.executable, "-m", "netcl", *DIGITS, "--epochs", "1", "--run", str(tmp_path)]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("Traceback") == 0
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("words", [["doctor"], ["report", "nowhere"]])
def test_a_closed_error_stream_is_not_standard_output(words):
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-m", "netcl", *words], capture_output=True, text=True)
    ready = "Ready: there is an OpenCL device" in done.stdout  # also where this run of the tests leaves OpenCL out
    assert done.returncode == (not ready) and "[report]" not in done.stdout


def test_a_trace_is_what_perfetto_opens(cl_selector, tmp_path, capsys):
    size = ["--data", "synthetic", "--data-options", "samples=128", "--model", "mlp", "--model-options", "hidden=[16]"]
    status, out, _ = run(
        capsys, "trace", *size, "--batch-size", 64, "--steps", 3, "--device", cl_selector, "--out", tmp_path / "trace.json"
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert status == 0 and len(spans) > 10 and all(event["dur"] >= 0 and event["name"] for event in spans)
    assert sum((event["name"], event["cat"]) == ("cross_entropy", "kernel") for event in spans) == 3  # the data has two batches
    assert spans[0]["name"] in out or any(event["name"] in out for event in spans)


def test_a_script_is_traced(cl_device, cl_selector, tmp_path, capsys):
    (tmp_path / "helper.py").write_text("FACTOR = 3.0\n")
    (tmp_path / "mine.py").write_text(
        "import sys\nimport netcl\nfrom helper import FACTOR\nfrom netcl.runtime.perf import timing_region\n"
        "with timing_region('mine'):\n    x = netcl.ones((64,)) * FACTOR + float(sys.argv[1])\n    print(sys.argv[2:], x.sum().item())\n"
    )
    words = ["trace", "--device", cl_selector, "--out", tmp_path / "trace.json", tmp_path / "mine.py"]
    status, _, err = run(capsys, *words, "--epochs", "2")  # which would not reach the script
    assert status == 1 and err.startswith(
        "[trace] recipe settings and --steps must not be given with a script; given=epochs; pass options of the script after --"
    )
    status, out, err = run(capsys, *words, "2.0", "--", "--epochs=2")
    assert status == 0 and "['--epochs=2'] 320.0\n" in out and f", on {cl_device.profile.title}\n" in out, err
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in told if e["name"] == "thread_name"}
    assert {lanes[e["pid"], e["tid"]] for e in told if e["name"] == "mine"} == {"regions"} and any(e.get("cat") == "kernel" for e in told)


@pytest.mark.fault("recipe with a number that no float holds", "an integer of 400 digits", "one line")
def test_a_number_that_no_float_holds_is_told(tmp_path, capsys):
    (tmp_path / "recipe.json").write_text('{"lr": 1' + "0" * 400 + "}")
    assert cli.main(["train", str(tmp_path / "recipe.json"), "--run", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.startswith("[recipe] lr must be a number; value=1000")
