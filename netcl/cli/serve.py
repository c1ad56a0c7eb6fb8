"""``netcl chat`` and ``netcl serve``: a language model in the terminal and behind HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from netcl.cli.command import DEVICE, CommandError, command, number, option, pick_device, say, whole
from netcl.cli.models import reported_faults
from netcl.core import env
from netcl.core.backend.lifecycle import finishing_first
from netcl.core.errors import message

_MODEL_PATH = option("path", help="a Hugging Face folder or a GGUF file")


def _chat_model(args: argparse.Namespace) -> Any:
    from netcl.models import CausalLM, load

    model = load(args.path, pick_device(args.device))
    if not isinstance(model, CausalLM):
        raise CommandError(message(args.command, "the model writes no text", model=type(model).__name__))
    return model


def _answer(model: Any, ids: Sequence[int], length: int, options: Mapping[str, Any], write: Callable[[str], object]) -> str:
    """Write an answer piece by piece; Ctrl-C ends it at the next token."""
    from netcl.models import TextStream

    stream, text = TextStream(model.tokenizer, ids), ""
    with finishing_first() as stop:
        for token in model.generate(ids, length, stream=True, **options):
            if stop.is_set() or token in model.tokenizer.end_tokens:
                break
            piece = stream.add(token)
            text += piece
            write(piece)
    rest = stream.rest()
    write(rest)
    return text + rest


@command(
    "chat",
    _MODEL_PATH,
    option("--system", default=None, help="the system message that conversations begin with"),
    option("--length", type=whole(1), default=1024, help="the most tokens of an answer"),
    option("--temperature", type=number(0), default=0.7, help="0 takes the likeliest token each time"),
    option("--top-k", type=whole(1), default=None, help="choose among so many likeliest"),
    option("--top-p", type=float, default=None, help="choose among the fewest that reach this probability"),
    option("--seed", type=whole(0), default=None, help="makes random choices repeatable"),
    DEVICE,
)
@reported_faults()
def chat(args: argparse.Namespace) -> int:
    """Talk to a language model in the terminal."""
    from netcl.nn.decoding import Sampling

    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    Sampling(**options).check()
    model, colours = _chat_model(args), sys.stdout.isatty() and not env.raw("NO_COLOR")
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    said = list(first)
    model.tokenizer.apply_chat_template([*first, {"role": "user", "content": ""}])  # a model without a template is told now
    say("/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer")

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    for turn in range(sys.maxsize):
        try:
            line = input("\033[1;32m>\033[0m " if colours else "> ").strip()
        except EOFError:
            line = "/exit"
        if line == "/exit":
            return 0
        if line == "/reset":
            said = list(first)
        elif line:
            said.append({"role": "user", "content": line})
            ids, write_colour = model.tokenizer.apply_chat_template(said), write if colours else lambda code: None
            if len(ids) >= model.context:
                raise CommandError(message("chat", "the conversation is longer than the context", "/reset forgets it", tokens=len(ids)))
            write_colour("\033[36m")
            seed = {} if args.seed is None else {"seed": args.seed + turn}
            said.append({"role": "assistant", "content": _answer(model, ids, args.length, {**options, **seed}, write)})
            write_colour("\033[0m")
            write("\n")
    return 0


@command(
    "serve",
    _MODEL_PATH,
    option("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0 is all of this machine's"),
    option("--port", type=whole(0, 65535), default=8080, help="the port to listen at"),
    option("--api-key", default=None, help="what requests must bring as a bearer token; NETCL_API_KEY otherwise"),
    option("--name", default=None, help="the model's name in requests; by default that of the file or folder"),
    option("--max-batch", type=whole(1), default=8, help="sequences that are computed together"),
    option("--max-queue", type=whole(1), default=64, help="requests that wait; more are refused with status 429"),
    option("--max-tokens", type=whole(1), default=1024, help="the most tokens of an answer"),
    option("--context", type=whole(2), default=None, help="the most tokens of prompt and answer; default: the model's, at most 4096"),
    option("--timeout", type=number(0), default=120.0, help="seconds that a request may take"),
    option("--grace", type=number(0), default=10.0, help="seconds that running requests have when the server ends"),
    DEVICE,
)
@reported_faults()
def serve(args: argparse.Namespace) -> int:
    """Serve a language model over HTTP with OpenAI's paths, and a chat page."""
    from netcl.serve import LOOPBACK, Batcher, ServeLimits, make_app, run_server

    model, key = _chat_model(args), args.api_key or env.value("NETCL_API_KEY") or None
    limits = ServeLimits(args.max_batch, args.max_queue, args.context, args.max_tokens, args.timeout)
    local = args.host in LOOPBACK
    if not local and key is None:
        print(f"warning: everybody who reaches {args.host} may use the model; --api-key asks for a key", file=sys.stderr)
    name = args.name or Path(args.path).resolve().name.removesuffix(".gguf")
    app = make_app(Batcher(model, limits), name, key, LOOPBACK if local else ("*",), args.grace)
    say(f"{name}: http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}", flush=True)
    return run_server(app, args.host, args.port, args.max_batch + args.max_queue + 64, args.grace)
