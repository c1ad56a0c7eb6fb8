"""The HTTP application: OpenAI's paths over a :class:`~netcl.serve.batching.Batcher`."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from netcl.core.backend.lifecycle import finishing_first
from netcl.core.errors import message
from netcl.nn.decoding import Sampling
from netcl.serve.batching import AnswerPart, Batcher, Metrics, ServeError, TextRequest

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise ImportError(message("serve", "the packages starlette and uvicorn are required", "pip install starlette uvicorn")) from None

BODY_BYTES, BODY_SECONDS = 8 << 20, 30.0  # of a request, and for them to arrive
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
_EVENT = "data: {}\n\n"
_PAGE_RULES = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)  # halves of characters


def _real(least: float, most: float, kinds: Any = (int, float)) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most


def _several(check: Callable[[Any], bool], most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and 0 < len(value) <= most and all(map(check, value))


def _content(given: Any) -> Any:
    """Return the content of a message, ``None`` if it is malformed; a list of text parts is joined."""
    value = given.get("content") if isinstance(given, dict) and _is_text(given.get("role")) else None
    parts: list[Any] = value if isinstance(value, list) else [None]
    several = all(isinstance(part, dict) and part.get("type") == "text" and _is_text(part.get("text")) for part in parts)
    return "".join(part["text"] for part in parts) if several else value


def _is_prompt(value: Any) -> bool:
    return (_is_text(value) and value != "") or _several(_real(0, 2**31, int))(value)


#: Fields of requests: how each is checked, and what it must be.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "messages": (_several(lambda value: _is_text(_content(value))), "a non-empty list of objects with the strings role and content"),
    "prompt": (_is_prompt, "a non-empty string or list of token ids"),
    "input": (lambda value: _is_prompt(value) or _several(_is_prompt, 256)(value), "a non-empty string, token ids, or 1 to 256 of them"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_k"), (_real(1, 2**31, int), "an integer from 1 to 2**31")),
    "temperature": (_real(0, 100), "a number from 0 to 100"),
    "top_p": (_real(1e-6, 1), "a number from 1e-6 to 1"),
    "min_p": (_real(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_real(0.01, 100), "a number from 0.01 to 100"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (_real(-2, 2), "a number from -2 to 2")),
    "seed": (_real(-(2**63), 2**63, int), "an integer of 64 bits"),
    "stop": (lambda value: _is_text(value) or _several(_is_text, 16)(value), "a string or a list of 1 to 16 strings"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "stream_options": (lambda value: value in ({}, {"include_usage": True}, {"include_usage": False}), "an object with include_usage only"),
}
#: Fields that are taken only with these values, which change nothing; and those that never do.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "echo": (False,),
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "suffix": ("",),
    "encoding_format": ("float",),
}  # fmt: skip
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}


async def _read_body(http: Request) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise ServeError(413, f"the body must have at most {BODY_BYTES} bytes")
    return bytes(body)


async def _read_fields(http: Request, needed: str, model: str) -> dict[str, Any]:
    """Return the fields of a JSON body; raises :class:`ServeError` if a field is unknown or invalid, or if ``needed`` is missing."""
    if (kind := http.headers.get("content-type", "")).partition(";")[0].strip().lower() != "application/json":
        raise ServeError(415, f"the content type must be application/json, got {kind!r:.80}")  # another could be sent by any web page
    try:
        given = json.loads(await asyncio.wait_for(_read_body(http), BODY_SECONDS))
    except (asyncio.TimeoutError, ClientDisconnect):
        raise ServeError(408, f"the body must arrive within {BODY_SECONDS:g} seconds") from None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ServeError(400, "the body must be a JSON object")
    found = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
    writes = {*_FIELDS, *_NEUTRAL, "model"} - ({"messages", "prompt", "input"} - {needed})
    known = {"input", "model", "encoding_format"} if needed == "input" else writes - {"encoding_format"}
    for name, value in found.items():
        if name not in known:
            raise ServeError(400, f"unknown field {name!r}; known are {', '.join(sorted(known))}")
        if name in _FIELDS and not _FIELDS[name][0](value):
            raise ServeError(400, f"{name} must be {_FIELDS[name][1]}, got {value!r:.80}")
        if name in _NEUTRAL and (type(value), value) not in [(type(known), known) for known in _NEUTRAL[name]]:  # 0 is not False
            raise ServeError(400, f"{name}={value!r:.80} is not supported; leave the field out")
    if {"max_tokens", "max_completion_tokens"} <= found.keys():
        raise ServeError(400, "max_tokens and max_completion_tokens must not both be given; leave max_tokens out")
    if "stream_options" in found and not found.get("stream"):
        raise ServeError(400, "stream_options requires stream=true; leave the field out")
    if needed not in found:
        raise ServeError(400, f"{needed} is required: {_FIELDS[needed][1]}")
    if found.get("model", model) != model:
        raise ServeError(404, f"unknown model {found['model']!r:.80}; this server has {model!r}")
    return found


def _usage(asked: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


class _Answer:
    """A request submitted to the batcher, whose answer is read in the event loop."""

    def __init__(self, batcher: Batcher, ids: Sequence[int], most: int, **options: Any):
        self._loop, self._parts = asyncio.get_running_loop(), asyncio.Queue[AnswerPart]()
        self.request = TextRequest(ids, most, self._deliver, **options)
        batcher.submit(self.request)

    def _deliver(self, part: AnswerPart) -> None:
        try:
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)
        except RuntimeError:  # the loop is closed: nobody reads the answer
            self.request.cancelled = True

    async def parts(self) -> AsyncIterator[AnswerPart]:
        part = AnswerPart()
        while not part.finish and part.vector is None:
            part = await self._parts.get()
            if part.error is not None:
                raise part.error
            yield part

    async def whole(self, http: Request) -> list[AnswerPart]:
        """Return all parts of the answer; raises :class:`ServeError` if the client closes the connection before the end."""

        async def collect() -> list[AnswerPart]:
            return [part async for part in self.parts()]

        work, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(http.receive())  # behind the body only the end can come
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ServeError(499, "the client closed the connection")
            return work.result()
        finally:
            self.request.cancelled = True
            work.cancel()
            gone.cancel()

    async def events(self, head: dict[str, Any], chat: bool, usage: bool) -> AsyncIterator[str]:
        """Yield the answer as server-sent events; an error becomes an event too."""

        def choice(text: str, finish: str | None = None, **more: str) -> str:
            content = {"delta": more | ({} if finish else {"content": text})} if chat else {"text": text}
            return _EVENT.format(json.dumps({**head, "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish}]}))

        try:
            if chat:
                yield choice("", role="assistant")
            async for part in self.parts():
                if part.text:
                    yield choice(part.text)
                if part.finish:
                    yield choice("", part.finish)
            if usage:
                yield _EVENT.format(json.dumps({**head, "choices": [], "usage": _usage(len(self.request.ids), self.request.made)}))
        except ServeError as fault:
            yield _EVENT.format(json.dumps(_error_body(fault.status, str(fault))))
        finally:  # also when the client is gone
            self.request.cancelled = True
        yield _EVENT.format("[DONE]")


class _Api:
    """The endpoints that need the model."""

    def __init__(self, batcher: Batcher, name: str):
        self.batcher, self.name = batcher, name

    def _ids(self, given: Any) -> list[int]:
        tokenizer = self.batcher.model.tokenizer
        if isinstance(given, str) or isinstance(given[0], int):
            return tokenizer.encode(given) if isinstance(given, str) else given
        try:
            return tokenizer.apply_chat_template([{**part, "content": _content(part)} for part in given])
        except ValueError as fault:  # the template refuses these roles, or there is none
            raise ServeError(400, str(fault)) from fault

    async def write(self, http: Request, needed: str) -> Response:
        fields = await _read_fields(http, needed, self.name)
        limits, ids, chat = self.batcher.limits, await run_in_threadpool(self._ids, fields[needed]), needed == "messages"
        most, stop, seed, stream = (fields.get(name) for name in ("max_tokens", "stop", "seed", "stream"))
        most = fields.get("max_completion_tokens", most)
        if most is not None and most > limits.tokens:
            raise ServeError(400, f"max_tokens (or max_completion_tokens) must be at most {limits.tokens}, got {most}")
        most = most or max(1, min(limits.tokens, self.batcher.capacity - len(ids)))
        sampling = Sampling(**{name: fields[name] for name in Sampling._fields if name in fields})
        stops, seed = [stop] if isinstance(stop, str) else stop or (), None if seed is None else seed % 2**64
        answer = _Answer(self.batcher, ids, most, sampling=sampling, seed=seed, stops=stops)
        kind = "text_completion" if not chat else "chat.completion.chunk" if stream else "chat.completion"
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}
        if stream:
            events = answer.events(head, chat, bool(fields.get("stream_options", {}).get("include_usage")))
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        parts = await answer.whole(http)
        text = "".join(part.text for part in parts)
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": parts[-1].finish}
        return JSONResponse({**head, "choices": [choice], "usage": _usage(len(ids), answer.request.made)})

    async def embed(self, http: Request) -> Response:
        given, data, tokens = (await _read_fields(http, "input", self.name))["input"], list[dict[str, Any]](), 0
        for one in [given] if isinstance(given, str) or isinstance(given[0], int) else given:
            answer = _Answer(self.batcher, await run_in_threadpool(self._ids, one), 0)
            (part,) = await answer.whole(http)
            data.append({"object": "embedding", "index": len(data), "embedding": part.vector})
            tokens += len(answer.request.ids)
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": _usage(tokens, 0)})


def _error_body(status: int, text: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"} | dict.fromkeys(range(500, 600), "server_error")
    code = "model_not_found" if text.startswith("unknown model") else None
    return {"error": {"message": text, "type": kinds.get(status, "invalid_request_error"), "param": None, "code": code}}


def _error_response(http: Any, fault: Exception) -> Response:
    status, text = 500, "the server failed"
    if isinstance(fault, ServeError | HTTPException):
        status, text = (fault.status, str(fault)) if isinstance(fault, ServeError) else (fault.status_code, fault.detail)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 429: {"Retry-After": "1"}}.get(status)
    return JSONResponse(_error_body(status, text), status, headers=headers)


class _Door:
    """Middleware that checks the API key of requests and counts responses by path and status."""

    def __init__(self, app: Any, metrics: Metrics, key: str | None, paths: Container[str]):
        self.app, self.metrics, self.paths, self.wanted = app, metrics, paths, None if key is None else f"bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, given = scope.get("path"), dict(scope.get("headers", ())).get(b"authorization", b"")

        async def counted(event: Any) -> None:
            if event["type"] == "http.response.start":
                self.metrics.add("netcl_requests_total", path=path if path in self.paths else "other", status=event["status"])
            await send(event)

        passes = self.wanted is None or path in (None, "/", "/health") or hmac.compare_digest(given[:7].lower() + given[7:], self.wanted)
        await (self.app if passes else _error_response(None, ServeError(401, "the API key is missing or wrong")))(scope, receive, counted)


def make_app(batcher: Batcher, name: str, key: str | None = None, hosts: Sequence[str] = ("*",), grace: float = 10.0) -> Starlette:
    """Return an ASGI application that serves the batcher's model as ``name``; at shutdown, requests may finish for ``grace`` seconds.

    The ``Host`` header must name one of ``hosts``. If ``key`` is given, it is the bearer token for all paths but ``/`` and ``/health``.
    """
    api, page = _Api(batcher, name), Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    models = {"object": "list", "data": [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "netcl"}]}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with batcher:
            yield
            await run_in_threadpool(batcher.close, grace=grace)

    posts = {"/v1/chat/completions": partial(api.write, needed="messages"), "/v1/completions": partial(api.write, needed="prompt")}
    gets = {
        "/v1/models": lambda _: JSONResponse(models),
        "/health": lambda _: JSONResponse({"status": "ok"}) if batcher.closing is None else JSONResponse({"status": "ending"}, 503),
        "/metrics": lambda _: PlainTextResponse(batcher.metrics.text(len(batcher.waiting), batcher.running)),
        "/": lambda _: HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_RULES, "X-Frame-Options": "DENY"}),
    }
    paths: dict[str, Any] = {**posts, "/v1/embeddings": api.embed, **gets}
    routes = [Route(path, answer, methods=["GET" if path in gets else "POST"]) for path, answer in paths.items()]
    faults: Any = dict.fromkeys((ServeError, HTTPException, Exception), _error_response)
    doors = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)), Middleware(_Door, metrics=batcher.metrics, key=key, paths=paths)]
    return Starlette(routes=routes, middleware=doors, exception_handlers=faults, lifespan=lifespan)


def run_server(app: Starlette, host: str, port: int, connections: int, grace: float, ready: Callable[[int], None]) -> int:
    """Serve until Ctrl-C or SIGTERM, then finish requests within ``grace`` seconds. Calls ``ready(port)`` once. Returns the exit status."""
    config = uvicorn.Config(app, host, port, log_level="warning", limit_concurrency=connections, timeout_graceful_shutdown=math.ceil(grace))
    server, socket = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],), name="netcl-http", daemon=True)
    with finishing_first() as stop:
        thread.start()
        while thread.is_alive() and not server.started and not stop.wait(0.02):
            pass
        ready(socket.getsockname()[1])
        while thread.is_alive() and not stop.wait(0.25):
            pass
        server.should_exit = True
        thread.join()
    return stop.status if stop.is_set() else 1
