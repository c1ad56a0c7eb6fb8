"""``netcl train``, ``report``, ``predict`` and ``trace``: training runs, their reports, predictions and traces."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from netcl.cli.command import DEVICE, CommandError, command, option, pick_device, reported, say, table, terminal_columns, whole
from netcl.core.errors import ShapeError, message


@contextmanager
def _errors_on_one_line() -> Iterator[None]:
    """Convert errors of recipes, files, shapes, non-finite losses, memory and missing packages to a ``CommandError``."""
    from netcl.io import FileError
    from netcl.trainer.recipe import RecipeError

    with reported((RecipeError, FileError, FloatingPointError, ShapeError, MemoryError)):
        yield


def setting_options(parser: argparse.ArgumentParser, settings: Any) -> None:
    """Add an option for each field of a dataclass of settings to a parser; its default is that of ``settings``."""
    parser.set_defaults(settings=[item.name for item in dataclasses.fields(settings)])
    for item in dataclasses.fields(settings):
        default, text = getattr(settings, item.name), item.metadata["doc"]
        name = f"--{item.name.replace('_', '-')}"
        if isinstance(default, bool):
            help_text = f"{text}; default: {'yes' if default else 'no'}"
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        elif isinstance(default, dict):
            help_text = f"{text}; values that are valid JSON are parsed"
            parser.add_argument(name, metavar="NAME=VALUE", nargs="+", action="extend", help=help_text)
        else:
            help_text = text if default == "" else f"{text}; default: {default}"
            parser.add_argument(name, type=type(default), default=None, metavar=type(default).__name__.upper(), help=help_text)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as options of :func:`setting_options`."""
    return {name: getattr(args, name) for name in args.settings if getattr(args, name) is not None}


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting of a recipe to a parser, as an option."""
    from netcl.trainer.recipe import Recipe

    parser.add_argument("file", nargs="?", help="a TOML or JSON file of settings, or a run's folder; options override its settings")
    DEVICE(parser)
    setting_options(parser, Recipe())


def _recipe(args: argparse.Namespace) -> Any:
    from netcl.trainer.recipe import Recipe, read_recipe

    recipe = Recipe()
    if args.file is not None:
        path = Path(args.file)
        recipe = recipe.changed(read_recipe(path / "config.json" if path.is_dir() else path))
    chosen = {name: _parsed_options(value) if isinstance(value, list) else value for name, value in given_settings(args).items()}
    return recipe.changed(chosen).resolved()


def _parsed_options(pairs: list[str]) -> dict[str, Any]:
    """Return options such as ``["n_layer=2", "norm=rms"]`` as a dictionary."""
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise CommandError(message("recipe", "an option of the data or the model must be NAME=VALUE", given=repr(pair)))
        try:
            found[name] = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            found[name] = text
    return found


def run_in_folder(parser: argparse.ArgumentParser) -> None:
    used = parser.add_mutually_exclusive_group()
    used.add_argument("--resume", action="store_true", help="continue from the run's last checkpoint, if there is one")
    used.add_argument("--overwrite", action="store_true", help="begin anew, and remove the checkpoints of an earlier run in the folder")


def _start_ranks(args: argparse.Namespace) -> int:
    """Run the same command on every rank, with ``--max-restarts``, and return the exit status; ``--device`` may list several devices."""
    from netcl.distributed.launch import INTERRUPTED, TERMINATED, launch
    from netcl.trainer import ModelCheckpoint
    from netcl.trainer.recipe import check_shares

    check_shares(_recipe(args), args.distributed)  # once, and not by every rank
    own = ("--distributed", "--device", "--max-restarts")
    words = [word for word in args.words if not word.startswith(tuple(f"{name}=" for name in own))]
    for name in own:
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    devices = args.device.split(",") if args.device else []
    if args.max_restarts and not args.resume:  # what a restart resumes must be this run's own
        ModelCheckpoint(_folder(args) / "checkpoints", overwrite=args.overwrite).claim(None)
    status = launch(["-m", "netcl", *words], args.distributed, devices)
    resumed = [word for word in words if word not in ("--overwrite", "--resume")] + ["--resume"]
    for attempt in range(1, args.max_restarts + 1):
        if status in (0, INTERRUPTED, TERMINATED):
            break
        sys.stderr.write(f"netcl: the job ended with status {status}; restart {attempt} of {args.max_restarts}, from its last checkpoint\n")
        status = launch(["-m", "netcl", *resumed], args.distributed, devices)
    return status


def _folder(args: argparse.Namespace) -> Path:
    if args.resume and not args.run and args.file is not None and Path(args.file).is_dir():
        return Path(args.file)
    recipe = _recipe(args)
    kind, _, place = recipe.data.partition(":")
    names = [kind, *([Path(place).stem] if place else []), recipe.model.rpartition(":")[2]]
    return Path(args.run or Path("runs") / "-".join(names))


@command(
    "train",
    _recipe_arguments,
    option("--run", help="the folder of the run; by default runs/DATA-MODEL, or the run's folder that --resume is given with"),
    run_in_folder,
    option("--distributed", type=whole(0), default=0, metavar="RANKS", help="processes, by mpiexec; --device may list several (by comma)"),
    option("--max-restarts", type=whole(0), default=0, metavar="N", help="restarts of a failed --distributed job from its last checkpoint"),
    option("--find-lr", action="store_true", help="find a learning rate first, and train with it"),
    option("--tensorboard", action="store_true", help="also write files for TensorBoard"),
)
@_errors_on_one_line()
def train(args: argparse.Namespace) -> int:
    """Train a model on your own files or on a named dataset; writes a folder with checkpoints, logs, the model and a report."""
    from netcl import distributed
    from netcl.trainer import TensorBoard
    from netcl.trainer.report_html import write_report
    from netcl.trainer.run import find_rate, train_run

    if args.distributed > 1 and distributed.world().size == 1:
        return _start_ranks(args)
    if args.max_restarts and distributed.world().size == 1:
        raise CommandError(message("train", "--max-restarts requires several ranks", "add --distributed RANKS"))
    recipe, handle, folder = _recipe(args), pick_device(args.device), _folder(args)
    if distributed.world().rank == 0:
        with suppress(BrokenPipeError):  # the run goes on without a reader; what is printed at its end then has status 141
            say(f"{recipe.data} / {recipe.model} on {handle.profile.title}", flush=True)
    callbacks = [TensorBoard(folder / "tensorboard")] if args.tensorboard else []
    if args.find_lr:
        if distributed.world().size > 1 or args.resume or args.lr is not None:
            raise CommandError(
                message("train", "--find-lr requires a new run of one process, without --lr", "run it alone, then pass --lr")
            )
        recipe = recipe.changed({"lr": find_rate(recipe, handle).suggestion})
        say(f"learning rate {recipe.lr:g} (found: a tenth of the one with the lowest loss)", flush=True)
    results = train_run(recipe, folder, handle, args.resume, callbacks, args.overwrite)
    if distributed.world().rank:
        return 0
    page = write_report(folder)
    rows = [[name, f"{value:.4f}"] for name, value in results["test"].items()]
    print(table(("test", ""), [*rows, ["seconds", f"{results['seconds']:.1f}"]]))
    if best := results["best"]:
        say(f"These numbers and the model are of epoch {best['epoch']} of {best['of']}, the best by {best['by']} ({best['value']:.4g}).")
    print(f"model   {folder / 'model.netcl'}\nreport  {page}")
    return 0


@command("report", option("run", help="the folder of a run"), option("--out", help="the file; default: report.html in the folder"))
@_errors_on_one_line()
def report(args: argparse.Namespace) -> int:
    """Write the report of a run as one self-contained page: curves, confusion matrix, predictions, slowest kernels."""
    from netcl.trainer.report_html import write_report

    print(write_report(args.run, args.out))
    return 0


@command(
    "predict",
    option("model", help="a file of a run: runs/NAME/model.netcl"),
    option("files", nargs="+", help="inputs as in training: pictures, .csv, .npz, .npy or IDX"),
    option("--class", dest="own", help="MODULE:CLASS or FILE.py:CLASS, for a model of your own"),
    option("--out", help="a CSV file to write instead of a table"),
    DEVICE,
)
@_errors_on_one_line()
def predict(args: argparse.Namespace) -> int:
    """Apply the model of a run to files; print the predictions or write them to a CSV file."""
    from netcl.io import load_model, read_notes
    from netcl.trainer.recipe import own_model
    from netcl.trainer.run import predict_file

    notes, handle = read_notes(args.model), pick_device(args.device)
    if not {"classes", "scale"} & notes.keys():
        remedy = "`netcl generate RUN` writes text" if notes.get("kind") == "text" else "train it with `netcl train`"
        raise CommandError(message("predict", "the model file must describe its inputs and outputs", remedy, file=args.model))
    if args.own:
        own_model(args.own)
    model = load_model(args.model, handle)
    try:
        rows = [[str(path), *row] for path in args.files for row in predict_file(model, notes, path)]
    except ValueError as fault:
        raise CommandError(str(fault)) from fault
    header = ("file", "row", notes.get("target") or "prediction", *([] if "scale" in notes else ["probability"]))
    if args.out:
        with Path(args.out).open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    print(args.out or table(header, rows))
    return 0


def _trace_script(words: list[str], handle: Any) -> Any:
    """Run a user's script under the profiler, as ``python script.py ...`` would; returns the profile."""
    from netcl.core.device import device
    from netcl.profiling import profile

    before, sys.argv = sys.argv, list(words)
    path, sys.path = sys.path, [str(Path(words[0]).resolve().parent), *sys.path]
    try:
        with device(handle), profile() as found:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before, path
    return found


@command(
    "trace",
    _recipe_arguments,
    option("script_arguments", nargs="*", help="arguments of a script (.py), which is traced as a whole; its options follow --"),
    option("--steps", type=whole(1), help="number of training steps to trace, after one warm-up step; default: 5"),
    option("--out", default="trace.json", help="the file to write, for https://ui.perfetto.dev or chrome://tracing"),
)
@_errors_on_one_line()
def trace_training(args: argparse.Namespace) -> int:
    """Trace the kernels of a script, or of a few training steps: a table here, and a chrome-trace file that Perfetto opens."""
    from netcl.profiling.report import COLUMNS, cells_of, text_table
    from netcl.trainer.run import trace_run

    handle = pick_device(args.device)
    if handle.backend != "cl":
        raise CommandError(message("trace", "the NumPy backend has no kernels to trace", "name an OpenCL device: --device cl"))
    is_script = bool(args.file) and args.file.endswith(".py")
    if args.script_arguments and not is_script:
        raise CommandError(message("trace", "arguments must follow a script (.py)", given=args.script_arguments, file=args.file))
    if is_script:
        if others := given_settings(args) | ({} if args.steps is None else {"steps": args.steps}):
            remedy = "pass options of the script after --: netcl trace --out trace.json script.py -- --epochs 2"
            raise CommandError(
                message("trace", "recipe settings and --steps must not be given with a script", remedy, given=", ".join(others))
            )
        found = _trace_script([args.file, *args.script_arguments], handle)
    else:
        found = trace_run(_recipe(args), handle, args.steps or 5)
    found.save_trace(args.out)
    say(found.summary())
    lines, room = text_table(found.rows), terminal_columns()
    fits = room is None or max(map(len, lines.splitlines())) <= room
    print(lines if fits else table(COLUMNS, [cells_of(row) for row in found.rows]))
    print(f"trace  {args.out}")
    return 0
