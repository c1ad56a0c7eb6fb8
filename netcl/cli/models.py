"""``netcl models info`` and ``netcl generate``: language models in files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from netcl.cli.command import DEVICE, CommandError, command, facts, option, pick_device, say, whole
from netcl.core.errors import message


@contextmanager
def reported_faults() -> Iterator[None]:
    """Errors of files, options and missing packages, reported in a line without a traceback."""
    try:
        yield
    except (ValueError, MemoryError) as fault:
        raise CommandError(str(fault)) from fault
    except ImportError as fault:
        if not str(fault).startswith("["):  # one of netcl's own modules
            raise
        raise CommandError(str(fault)) from fault


@command(
    "models",
    option("action", choices=("info",), help="info: what a file or folder holds"),
    option("path", help="a Hugging Face folder or a GGUF file"),
)
@reported_faults()
def models(args: argparse.Namespace) -> int:
    """Tell what a model file or folder holds: architecture, sizes, types of tensors."""
    from netcl.models import describe_model

    say(facts(describe_model(args.path)))
    return 0


def load_writer(args: argparse.Namespace) -> Any:
    """The language model of a command."""
    from netcl.models import CausalLM, load

    model = load(args.path, pick_device(args.device))
    if not isinstance(model, CausalLM):
        raise CommandError(message(args.command, "the model writes no text", model=type(model).__name__))
    return model


@command(
    "generate",
    option("path", help="a Hugging Face folder, a GGUF file, or the folder of a run with the model gpt"),
    option("prompt", nargs="?", default=None, help="what the text begins with"),
    option("--prompt", dest="named_prompt", default=None, help="the same, as an option"),
    option("--length", type=whole(0), default=None, help="tokens to write (bytes for a run); default: 300"),
    option("--temperature", type=float, default=None, help="0 takes the likeliest token each time; default: 0, for a run 0.8"),
    option("--top-k", type=int, default=None, help="choose among so many likeliest"),
    option("--top-p", type=float, default=None, help="choose among the fewest that reach this probability"),
    option("--seed", type=int, default=None, help="makes random choices repeatable; a run has its own"),
    option("--stop", action="append", default=[], help="a string that ends the text; may be given several times"),
    DEVICE,
)
@reported_faults()
def generate_text(args: argparse.Namespace) -> int:
    """Continue a prompt with a language model or with the model of a run."""
    from netcl.nn.decoding import Sampling

    run = (Path(args.path) / "model.netcl").is_file()
    temperature = (0.8 if run else 0.0) if args.temperature is None else args.temperature
    options = {"temperature": temperature, "top_k": args.top_k, "top_p": args.top_p}
    Sampling(**options).check()
    prompt = args.prompt if args.named_prompt is None else args.named_prompt
    length = 300 if args.length is None else args.length
    if run:
        from netcl.trainer.run import generate as write

        print(write(args.path, "\n" if prompt is None else prompt, length, pick_device(args.device), args.seed, **options))
        return 0
    model = load_writer(args)
    if not prompt:
        raise CommandError(message("generate", "a prompt is needed", 'netcl generate PATH "Once upon a time"'))
    sys.stdout.write(prompt)
    for piece in model.generate(prompt, length, seed=args.seed, stop=args.stop, stream=True, **options):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0
