"""``netcl chat`` and ``netcl serve``: a language model in the terminal and behind HTTP."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from netcl.cli.command import DEVICE, CommandError, command, number, option, reported, say, whole
from netcl.cli.models import MODEL_PATH, SAMPLING_OPTIONS, load_writer, sampling_options
from netcl.core import env
from netcl.core.backend.lifecycle import finishing_first
from netcl.core.errors import message


@command(
    "chat",
    MODEL_PATH,
    option("--system", default=None, help="the system message that conversations begin with"),
    option("--length", type=whole(1), default=1024, help="maximum tokens of an answer"),
    *SAMPLING_OPTIONS,
    DEVICE,
)
@reported()
def chat(args: argparse.Namespace) -> int:
    """Talk to a language model in the terminal."""
    from netcl.models import TextStream

    options, model, turns = {"temperature": 0.7, **sampling_options(args)}, load_writer(args), 0
    colors = ("\033[1;32m", "\033[36m", "\033[0m") if sys.stdout.isatty() and not env.raw("NO_COLOR") else ("", "", "")
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    history = list(first)
    say("/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer")
    while True:
        try:
            line = input(f"{colors[0]}>{colors[2]} ").strip()
        except EOFError:
            line = "/exit"
        if line == "/exit":
            return 0
        if line in ("", "/reset"):
            history = list(first) if line else history
            continue
        ids = model.tokenizer.apply_chat_template([*history, {"role": "user", "content": line}])
        stream, text, turns = TextStream(model.tokenizer, ids), "", turns + 1
        seed = None if args.seed is None else args.seed + turns - 1
        tokens = model.generate(ids, args.length, seed=seed, stream=True, **options)
        print(colors[1], end="")
        with finishing_first() as stop:
            for token in tokens:
                if stop.is_set() or token in model.tokenizer.end_tokens:
                    break
                text += (piece := stream.add(token))
                print(piece, end="", flush=True)
        print(stream.rest() + colors[2])
        history += [{"role": "user", "content": line}, {"role": "assistant", "content": text + stream.rest()}]


@command(
    "serve",
    MODEL_PATH,
    option("--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0 means all addresses of this machine"),
    option("--port", type=whole(0, 65535), default=8080, help="the port to listen on; 0 takes a free one"),
    option("--api-key", default=None, help="the bearer token that requests must have; default: NETCL_API_KEY"),
    option("--max-batch", type=whole(1), default=8, help="sequences that are computed together"),
    option("--max-queue", type=whole(1), default=64, help="requests that wait; more are refused with status 429"),
    option("--max-tokens", type=whole(1), default=1024, help="maximum tokens of an answer"),
    option("--context", type=whole(2), default=None, help="maximum tokens of prompt and answer; default: the model's, at most 4096"),
    option("--timeout", type=number(0), default=120.0, help="seconds that a request may take"),
    option("--grace", type=number(0), default=10.0, help="seconds that running requests have to finish when the server stops"),
    DEVICE,
)
@reported()
def serve(args: argparse.Namespace) -> int:
    """Serve a language model over HTTP with OpenAI's API, and a chat page."""
    from netcl.serve import Batcher, ServeLimits, app, make_app, run_server

    if args.api_key == "":  # an unset variable of a shell: a server without a key would be open
        raise CommandError(message("serve", "--api-key must not be empty", "leave the option out to serve without a key"))
    key, hosts = args.api_key or env.value("NETCL_API_KEY") or None, app.LOOPBACK if args.host in app.LOOPBACK else ("*",)
    if hosts != app.LOOPBACK and key is None:
        print(f"warning: everybody who reaches {args.host} may use the model; --api-key asks for a key", file=sys.stderr)
    limits = ServeLimits(args.max_batch, args.max_queue, args.context, args.max_tokens, args.timeout)
    name, host = Path(args.path).resolve().name.removesuffix(".gguf"), f"[{args.host}]" if ":" in args.host else args.host
    served = make_app(Batcher(load_writer(args), limits), name, key, hosts, args.grace)
    most = args.max_batch + args.max_queue + 64  # connections; some only ask for the page
    return run_server(served, args.host, args.port, most, args.grace, lambda port: say(f"{name}: http://{host}:{port}", flush=True))
