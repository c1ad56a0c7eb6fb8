"""docs/internals/architecture.md says what the code does: its figures are compared with traced calls, its tables with the tree."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import netcl as nc
from netcl import nn
from tests.conftest import eager_fusion

ROOT = Path(__file__).parent.parent
PACKAGE = Path(nc.__file__).parent
PAGE = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
LINE = re.compile(r"(?P<indent> *)(?P<miss>miss: )?(?P<function>[\w.]+)  +(?P<file>[\w/]+\.py)\b")

Step = tuple[str, str]  # file and function


class Entry(NamedTuple):
    """A line of a figure, or a call of a trace: the function that is called and those it is called from, outermost first."""

    step: Step
    callers: tuple[Step, ...]
    miss: bool = False


def figure(name: str) -> list[Entry]:
    (text,) = re.findall(rf"<!-- figure: {name} -->\n```text\n(.*?)```", PAGE, re.S)
    entries: list[Entry] = []
    stack: list[tuple[int, Step]] = []
    for line in filter(None, map(LINE.match, text.splitlines())):
        indent, step = len(line["indent"]), (line["file"], line["function"].rpartition(".")[2])
        stack = [(outer, caller) for outer, caller in stack if outer < indent]
        entries.append(Entry(step, tuple(caller for _, caller in stack), bool(line["miss"])))
        stack.append((indent, step))
    return entries


def traced(run: Callable[[], object]) -> list[Entry]:
    """The calls of netcl's functions in their order. Garbage of other tests must not be collected meanwhile."""
    calls: list[Entry] = []
    stack: list[Step | None] = []

    def listen(frame, event, argument):
        if event == "call":
            path = Path(frame.f_code.co_filename)
            own = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""
            step = (own, frame.f_code.co_name) if own else None
            if step is not None:
                calls.append(Entry(step, tuple(filter(None, stack))))
            stack.append(step)
        elif event == "return" and stack:
            stack.pop()

    before = sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(listen)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def contains(whole: tuple[Step, ...], part: tuple[Step, ...]) -> bool:
    """Whether a tuple has the items of another in their order, among others."""
    rest = iter(whole)
    return all(step in rest for step in part)


def missing(entries: list[Entry], calls: list[Entry]) -> list[Step]:
    """The entries of a figure that a trace does not have in their order and below their callers; only the first can be told."""
    rest = iter(calls)
    for entry in entries:
        if not any(call.step == entry.step and contains(call.callers, entry.callers) for call in rest):
            return [entry.step]
    return []


def linear_and_activation(rng) -> Callable[[], object]:
    model, x = nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU()), nc.tensor(rng.standard_normal((4, 16), np.float32))
    return lambda: model(x)


def test_a_call_does_what_the_figure_says(cl_device, rng):
    entries, run = figure("opencl"), linear_and_activation(rng)
    planning = {entry.step for entry in entries if entry.miss}
    with eager_fusion(0):  # forgets plans, those of other tests too
        first, *others = (traced(run) for _ in range(4))
    assert len(entries) > 20 and planning
    assert missing(entries, first) == []
    assert missing([entry for entry in entries if not entry.miss], others[0]) == []
    assert others[0] == others[1] == others[2]
    assert planning.isdisjoint(call.step for call in others[0])


def test_a_backward_pass_does_what_the_figure_says(cl_device, rng):
    """The first pass walks; the second plans; later passes look the plan up and call no rule."""
    entries, model = figure("backward"), nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU())
    planning = {entry.step for entry in entries if entry.miss}
    passes = []
    with eager_fusion(0):
        for _ in range(5):
            model.zero_grad()
            loss = model(nc.ones((4, 16))).sum()
            passes.append(traced(loss.backward))
    _, second, *others = passes
    assert len(entries) > 7 and planning
    assert missing(entries, second) == []
    assert missing([entry for entry in entries if not entry.miss], others[0]) == []
    assert others[0] == others[1] == others[2]
    assert planning.isdisjoint(call.step for call in others[0])


def test_a_call_on_numpy_does_what_the_figure_says(rng):
    with nc.device("cpu"):
        run = linear_and_activation(rng)
        calls = [traced(run) for _ in range(3)]
    assert [missing(figure("numpy"), found) for found in calls] == [[]] * 3 and calls[1] == calls[2]


@pytest.mark.parametrize("name", ["chain", "epilogue"])
def test_deferred_values_are_computed_as_the_figures_say(name, cl_device, rng):
    a, b = (nc.tensor(rng.standard_normal((16, 16), np.float32)) for _ in range(2))
    run = {"chain": lambda: (a * 2.0 + 1.0).to_host(), "epilogue": lambda: nc.relu(nc.matmul(a, b)).to_host()}[name]
    with eager_fusion(1):
        first, second = traced(run), traced(run)
    assert missing(figure(name), first) == [] and missing(figure(name), second) == []


def test_every_file_of_the_page_exists():
    named = {*re.findall(r"\b((?:\w+/)+\w+\.py)\b", re.sub(r"\]\([^)]*\)", "]", PAGE))}
    assert len(named) > 25
    assert sorted(name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()) == []


def test_the_layers_are_those_of_the_contract():
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition('id = "layers"')[2]
    layers = [re.findall(r"\w+", layer) for layer in re.findall(r'^    "(.+)",$', contract.partition("\n]\n")[0], re.M)]
    table = PAGE.partition("| packages | what belongs there |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [re.findall(r"`(\w+)`", row.split(" | ")[0]) for row in table.splitlines()] == layers


def test_the_terms_of_the_glossary_are_in_the_code():
    rows = [row.strip("| ").split(" | ") for row in PAGE.partition("## Glossary")[2].splitlines() if row.startswith("| ")][1:]
    names = {*re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")))}
    assert len(rows) > 20 and [term for term, _, _ in rows] == sorted(term for term, _, _ in rows)
    unknown = {term: [name for name in re.findall(r"`(\w+)`", where) if name not in names] for term, _, where in rows}
    assert {term: found for term, found in unknown.items() if found} == {}
    assert [term for term, _, where in rows if "`" not in where] == []
