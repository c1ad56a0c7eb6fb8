"""``netcl models info``, ``netcl convert``, ``netcl generate`` and ``netcl finetune``: language models in files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from netcl.cli.command import DEVICE, CommandError, command, facts, option, pick_device, reported, say, whole
from netcl.cli.train import given_settings, run_in_folder, setting_options
from netcl.core.errors import message

MODEL_PATH = option("path", help="a Hugging Face folder or a GGUF file")


@command("models", option("action", choices=("info",), help="info: what a file or folder holds"), MODEL_PATH)
@reported()
def models(args: argparse.Namespace) -> int:
    """Describe a model file or folder: architecture, sizes, types of tensors."""
    from netcl.models import describe_model

    say(facts(describe_model(args.path)))
    return 0


def load_writer(args: argparse.Namespace) -> Any:
    """Load the language model ``args.path`` and merge its projections; raises if the model does not generate text."""
    from netcl.models import CausalLM, load

    model = load(args.path, pick_device(args.device))
    if not isinstance(model, CausalLM):
        raise CommandError(message(args.command, "the model must be a decoder-only language model (CausalLM)", model=type(model).__name__))
    return model.merge_projections()


@command(
    "convert",
    option("source", help="a Hugging Face folder or a GGUF file"),
    option("target", help="a GGUF file if the name ends in .gguf, else a folder; it must not exist"),
    option("--bits", type=int, choices=(4, 8), default=None, help="bits per weight of matrices in a GGUF file: 4 is Q4_0, 8 is Q8_0"),
    option("--kind", default=None, help="another block type of GGUF, for instance Q4_K"),
)
@reported()
def convert(args: argparse.Namespace) -> int:
    """Convert a model between a Hugging Face folder and a GGUF file, or quantize its weights."""
    from netcl.models import load, save

    gguf, kind = args.target.endswith(".gguf"), args.kind or {4: "Q4_0", 8: "Q8_0", None: None}[args.bits]
    if Path(args.target).exists():
        raise CommandError(message("convert", "the target must not exist", "remove it, or choose another name", target=args.target))
    if args.bits and args.kind:
        raise CommandError(message("convert", "--bits and --kind must not be given together", bits=args.bits, kind=args.kind))
    if kind is not None and not gguf:
        raise CommandError(message("convert", "quantized weights require a GGUF file", "name the target FILE.gguf", target=args.target))
    save(load(args.source, "cpu"), args.target, "gguf" if gguf else "hf", kind=kind)
    return 0


_REAL_OPTIONS = {
    "temperature": "0 always takes the most likely token; default: 0 to generate, 0.7 to chat, and 0.8 for a run",
    "top-p": "choose among the most likely tokens whose probabilities add up to this",
    "min-p": "choose among tokens with at least this share of the highest probability",
    "repetition-penalty": "above 1, tokens that occur in the prompt or the text become less likely",
    "presence-penalty": "subtracted from the logits of tokens that occur in the text",
    "frequency-penalty": "subtracted from the logits of tokens that occur in the text, once per occurrence",
}
SAMPLING_OPTIONS = [
    *(option(f"--{name}", type=float, default=None, help=text) for name, text in _REAL_OPTIONS.items()),
    option("--top-k", type=int, default=None, help="choose among this many most likely tokens"),
    option("--seed", type=whole(0), default=None, help="makes random choices repeatable; a run has its own"),
]


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that a command was given; raises if one is out of range."""
    from netcl.nn.decoding import Sampling

    given = {name: value for name in Sampling._fields if (value := getattr(args, name)) is not None}
    Sampling(**given).check()
    return given


@command(
    "generate",
    option("path", help="a Hugging Face folder, a GGUF file, or the folder of a run with the model gpt"),
    option("prompt", nargs="?", default=None, help="the beginning of the text"),
    option("--prompt", dest="named_prompt", default=None, help="the same, as an option"),
    option("--length", type=whole(0), default=None, help="tokens to write (bytes for a run); default: 300"),
    *SAMPLING_OPTIONS,
    option("--stop", action="append", default=[], help="a string that ends the text; may be given several times"),
    DEVICE,
)
@reported()
def generate_text(args: argparse.Namespace) -> int:
    """Continue a prompt with a language model or with the model of a run."""
    run = (Path(args.path) / "model.netcl").is_file()
    options = {"temperature": 0.8 if run else 0.0, **sampling_options(args)}
    if None not in (args.prompt, args.named_prompt):
        raise CommandError(message("generate", "the prompt must be given once", prompts=[args.prompt, args.named_prompt]))
    prompt = args.prompt if args.named_prompt is None else args.named_prompt
    length = 300 if args.length is None else args.length
    if run:
        from netcl.trainer.run import generate as write

        if other := sorted({*options, *(["stop"] if args.stop else [])} - {"temperature", "top_k", "top_p"}):
            raise CommandError(message("generate", "the model of a run accepts only temperature, top-k and top-p", given=other))
        print(write(args.path, "\n" if prompt is None else prompt, length, pick_device(args.device), args.seed, **options))
        return 0
    model = load_writer(args)
    if not prompt:
        raise CommandError(message("generate", "a non-empty prompt must be given", 'netcl generate PATH "Once upon a time"'))
    sys.stdout.write(prompt)
    for piece in model.generate(prompt, length, seed=args.seed, stop=args.stop, stream=True, **options):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0


def _tuning_options(parser: argparse.ArgumentParser) -> None:
    from netcl.trainer.finetune import TuningSettings

    setting_options(parser, TuningSettings())


@command(
    "finetune",
    MODEL_PATH,
    option("--data", required=True, help="a JSONL file of rows with messages, with prompt and completion, or with text"),
    option("--out", required=True, help="the folder of the run and its results"),
    _tuning_options,
    option("--merge", default="", metavar="FORMAT", help="also write the merged model: hf, gguf, or a type of GGUF such as Q8_0"),
    run_in_folder,
    DEVICE,
)
@reported()
def finetune_model(args: argparse.Namespace) -> int:
    """Train a language model further on conversations or text: adapters (LoRA, DoRA, QLoRA) or all weights."""
    from netcl.trainer.finetune import TuningSettings, finetune

    chosen = TuningSettings(**given_settings(args))
    found = finetune(args.path, args.data, args.out, chosen, device_name=pick_device(args.device), resume=args.resume,
                     overwrite=args.overwrite, merged=args.merge)  # fmt: skip
    shown = {name: f"{value:.4f}" for name, value in found.items() if name.endswith(("loss", "perplexity"))}
    print(facts({**shown, "steps": found["steps"], "results": args.out}))
    return 0
