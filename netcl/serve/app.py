"""The HTTP application: OpenAI's paths over a :class:`~netcl.serve.batching.Batcher`."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from netcl.core.backend.lifecycle import finishing_first
from netcl.core.errors import message
from netcl.nn.decoding import Sampling
from netcl.serve.batching import AnswerPart, Batcher, ServeError, TextRequest

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise ImportError(message("serve", "the packages starlette and uvicorn are needed", 'pip install "netcl-dl[serve]"')) from None

MOST_BYTES = 8 << 20  # of a request
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
_PAGE_RULES = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_PARTS_OF_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}


# ---- fields of requests


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)  # halves of characters


def _real(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _integer(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_stop(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and len(value) <= 16 and all(map(_is_text, value)))


def _is_prompt(value: Any) -> bool:
    return (_is_text(value) and value) or (isinstance(value, list) and value and all(map(_integer(0), value)))


def _content(value: Any) -> str | None:
    """The text of a message: a string, or parts of which all are text."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    return value if _is_text(value) else None


def _is_conversation(value: Any) -> bool:
    fits = isinstance(value, list) and value and all(isinstance(part, dict) for part in value)
    return fits and all(_is_text(part.get("role")) and _content(part.get("content")) is not None for part in value)


def _is_inputs(value: Any) -> bool:
    several = isinstance(value, list) and 0 < len(value) <= 256 and all(_is_prompt(part) for part in value)
    return bool(_is_prompt(value) or several)


_WRITTEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_tokens": (_integer(1), "an integer from 1"),
    "max_completion_tokens": (_integer(1), "an integer from 1"),
    "temperature": (_real(0, 100), "a number from 0 to 100"),
    "top_p": (_real(1e-6, 1), "a number above 0, up to 1"),
    "top_k": (_integer(1), "an integer from 1"),
    "seed": (_integer(-(2**63), 2**63), "an integer of 64 bits"),
    "stop": (_is_stop, "a string or up to 16 strings"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "stream_options": (lambda value: isinstance(value, dict) and {*value} <= {"include_usage"}, "an object with include_usage"),
}
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], Any], str]]] = {
    "chat": {**_WRITTEN, "messages": (_is_conversation, "a list of objects with the strings role and content")},
    "text": {**_WRITTEN, "prompt": (_is_prompt, "a string or a list of token ids")},
    "embeddings": {
        "input": (_is_inputs, "a string, a list of token ids, or up to 256 of either"),
        "encoding_format": (lambda value: value == "float", "float"),
    },
}
#: Fields that are taken only with these values, which change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "echo": (False,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "suffix": ("",),
}  # fmt: skip
_UNUSED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}


async def _read_fields(http: Request, kind: str, needed: str, model: str) -> dict[str, Any]:
    """The checked fields of a JSON body; :class:`ServeError` says what is wrong with it."""
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ServeError(415, "the content type must be application/json")  # another could be sent by any web page
    body = b""
    async for part in http.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ServeError(413, f"the body must have at most {MOST_BYTES} bytes")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as fault:
        raise ServeError(400, f"the body must be JSON: {fault}") from fault
    if not isinstance(given, dict):
        raise ServeError(400, "the body must be a JSON object")
    found = {name: value for name, value in given.items() if value is not None and name not in _UNUSED}
    known = _FIELDS[kind]
    for name, value in found.items():
        if name in known and not known[name][0](value):
            raise ServeError(400, f"{name} must be {known[name][1]}")
        if name in _NEUTRAL and not any(value == neutral for neutral in _NEUTRAL[name]):
            raise ServeError(400, f"{name} is not supported; leave it out")
        if name not in known and name not in _NEUTRAL and name != "model":
            raise ServeError(400, f"unknown field {name!r}")
    if needed not in found:
        raise ServeError(400, f"{needed} is needed: {known[needed][1]}")
    if found.get("model", model) != model:
        raise ServeError(404, f"unknown model; this server has {model!r}")
    return found


# ---- the application


class _Api:
    def __init__(self, batcher: Batcher, name: str):
        self.batcher, self.name, self.created = batcher, name, int(time.time())

    def _prompt(self, kind: str, fields: Mapping[str, Any]) -> list[int]:
        tokenizer = self.batcher.model.tokenizer
        if kind == "chat":
            try:
                return tokenizer.apply_chat_template([{**part, "content": _content(part["content"])} for part in fields["messages"]])
            except ValueError as fault:  # the template refuses these roles, or there is none
                raise ServeError(400, str(fault)) from fault
        return tokenizer.encode(fields["prompt"]) if isinstance(fields["prompt"], str) else fields["prompt"]

    def _submit(self, ids: Sequence[int], most: int, **options: Any) -> tuple[TextRequest, asyncio.Queue[AnswerPart]]:
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[AnswerPart]()

        def deliver(part: AnswerPart) -> None:
            try:
                loop.call_soon_threadsafe(parts.put_nowait, part)
            except RuntimeError:  # the loop is closed: nobody reads the answer
                request.cancel()

        request = TextRequest(ids, most, deliver, **options)
        self.batcher.submit(request)
        return request, parts

    async def write(self, http: Request, kind: str) -> Response:
        """Chat and plain completions, whole or streamed."""
        fields = await _read_fields(http, kind, "messages" if kind == "chat" else "prompt", self.name)
        limits, ids = self.batcher.limits, await run_in_threadpool(self._prompt, kind, fields)
        most = fields.get("max_completion_tokens", fields.get("max_tokens"))
        if most is None:
            most = max(1, min(limits.tokens, self.batcher.capacity - len(ids)))
        elif most > limits.tokens:
            raise ServeError(400, f"max_tokens must be at most {limits.tokens}")
        stop, seed = fields.get("stop", ()), fields.get("seed")
        sampling = Sampling(fields.get("temperature", 1.0), fields.get("top_k"), fields.get("top_p"))
        request, parts = self._submit(ids, most, sampling=sampling, seed=None if seed is None else seed % 2**64,
                                      stops=(stop,) if isinstance(stop, str) else stop)  # fmt: skip
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if fields.get("stream"):
            usage = bool(fields.get("stream_options", {}).get("include_usage"))
            events = self._events(request, parts, {**head, "object": "chat.completion.chunk" if kind == "chat" else "text_completion"}, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        text, finish = await _unless_gone(http, request, _whole(parts))
        said = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        shape = "chat.completion" if kind == "chat" else "text_completion"
        return JSONResponse({**head, "object": shape, "choices": [choice], "usage": _usage(request)})

    async def _events(self, request: TextRequest, parts: asyncio.Queue[AnswerPart], head: dict[str, Any], usage: bool) -> AsyncIterator[str]:
        """Server-sent events of an answer."""
        chat = head["object"] == "chat.completion.chunk"

        def event(text: str | None, finish: str | None, **more: str) -> str:
            said = {"delta": more | ({} if text is None else {"content": text})} if chat else {"text": text or ""}
            return _event({**head, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish}]})

        try:
            if chat:
                yield event("", None, role="assistant")
            part = AnswerPart()
            while not part.finish:
                part = await parts.get()
                if part.error is not None:
                    yield _event(_error_body(part.error.status, str(part.error)))
                    break
                if part.text:
                    yield event(part.text, None)
                if part.finish:
                    yield event(None, part.finish)
            if usage and part.error is None:
                yield _event({**head, "choices": [], "usage": _usage(request)})
            yield "data: [DONE]\n\n"
        finally:  # also when the client is gone
            request.cancel()

    async def embed(self, http: Request) -> Response:
        """Vectors of texts: the mean of the states that the head sees."""
        fields, tokenizer = await _read_fields(http, "embeddings", "input", self.name), self.batcher.model.tokenizer
        given, vectors, tokens = fields["input"], [], 0
        several = isinstance(given, list) and not isinstance(given[0], int)
        for one in given if several else [given]:
            ids = await run_in_threadpool(tokenizer.encode, one) if isinstance(one, str) else one
            request, parts = self._submit(ids, 0)
            vectors.append((await _unless_gone(http, request, _next_part(parts))).vector)
            tokens += len(ids)
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return JSONResponse(
            {"object": "list", "data": data, "model": self.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        )

    async def models(self, http: Request) -> Response:
        """The one model there is."""
        row = {"id": self.name, "object": "model", "created": self.created, "owned_by": "netcl"}
        return JSONResponse({"object": "list", "data": [row]})

    async def health(self, http: Request) -> Response:
        """200 while requests are taken."""
        return JSONResponse({"status": "ok"}) if self.batcher.alive else JSONResponse({"status": "ending"}, 503)

    async def metrics(self, http: Request) -> Response:
        """Prometheus' text format."""
        gauges = {"netcl_queue_length": len(self.batcher.waiting), "netcl_running_sequences": self.batcher.running}
        return PlainTextResponse(self.batcher.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def page(self, http: Request) -> Response:
        """The chat page."""
        text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _PAGE_RULES, "X-Frame-Options": "DENY"})


def _event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(request: TextRequest) -> dict[str, int]:
    return {"prompt_tokens": len(request.ids), "completion_tokens": request.made, "total_tokens": len(request.ids) + request.made}


async def _next_part(parts: asyncio.Queue[AnswerPart]) -> AnswerPart:
    part = await parts.get()
    if part.error is not None:
        raise part.error
    return part


async def _whole(parts: asyncio.Queue[AnswerPart]) -> tuple[str, str]:
    pieces, part = [], AnswerPart()
    while not part.finish:
        part = await _next_part(parts)
        pieces.append(part.text)
    return "".join(pieces), part.finish


async def _unless_gone(http: Request, request: TextRequest, work: Any) -> Any:
    """The result of a coroutine, or an error as soon as the client has closed the connection; the request is cancelled then."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] not in done:
            raise ServeError(499, "the client closed the connection")
        return tasks[0].result()
    finally:
        request.cancel()
        for task in tasks:
            task.cancel()


def _error_body(status: int, text: str) -> dict[str, Any]:
    kind = _PARTS_OF_ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": text, "type": kind, "param": None, "code": "model_not_found" if text.startswith("unknown model") else None}}


def _error_response(http: Request, fault: Exception) -> Response:
    status = fault.status if isinstance(fault, ServeError) else fault.status_code if isinstance(fault, HTTPException) else 500
    text = str(fault) if isinstance(fault, ServeError) else fault.detail if isinstance(fault, HTTPException) else "the server failed"
    return JSONResponse(_error_body(status, text), status, headers={"Retry-After": "1"} if status == 429 else None)


class _Door:
    """Checks the key of requests, and counts answers by path and status."""

    def __init__(self, app: Any, batcher: Batcher, key: str | None, paths: Sequence[str]):
        self.app, self.metrics, self.paths = app, batcher.metrics, {*paths}
        self.wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(event: Any) -> None:
            if event["type"] == "http.response.start":
                self.metrics.count("netcl_requests_total", path=path if path in self.paths else "other", status=event["status"])
            await send(event)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if self.wanted is None or path in ("/", "/health") or hmac.compare_digest(given, self.wanted):
            await self.app(scope, receive, counted)
        else:
            answer = JSONResponse(_error_body(401, "the API key is missing or wrong"), 401, headers={"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, counted)


def make_app(batcher: Batcher, name: str, key: str | None = None, hosts: Sequence[str] = ("*",), grace: float = 10.0) -> Starlette:
    """An ASGI application that answers with a batcher.

    - **name**: of the model. **key**: what requests must bring as ``Authorization: Bearer KEY``; the page and ``/health`` need none.
    - **hosts**: names that the ``Host`` header may have. **grace**: seconds that running requests have at the end.
    """
    api = _Api(batcher, name)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with batcher:
            yield
            await run_in_threadpool(batcher.close, grace)

    async def chat(http: Request) -> Response:
        return await api.write(http, "chat")

    async def text(http: Request) -> Response:
        return await api.write(http, "text")

    posts = {"/v1/chat/completions": chat, "/v1/completions": text, "/v1/embeddings": api.embed}
    gets = {"/v1/models": api.models, "/health": api.health, "/metrics": api.metrics, "/": api.page}
    routes = [Route(path, answer, methods=[method]) for method, rows in (("POST", posts), ("GET", gets)) for path, answer in rows.items()]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        Middleware(_Door, batcher=batcher, key=key, paths=[*posts, *gets]),
    ]
    faults: Any = {ServeError: _error_response, HTTPException: _error_response, Exception: _error_response}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=faults, lifespan=lifespan)


def run_server(app: Starlette, host: str, port: int, connections: int, grace: float = 10.0) -> int:
    """Serve until Ctrl-C or SIGTERM, then let running requests finish for ``grace`` seconds; the exit status."""
    config = uvicorn.Config(app, host, port, log_level="warning", limit_concurrency=connections, timeout_graceful_shutdown=math.ceil(grace))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="netcl-http", daemon=True)
    with finishing_first() as stop:
        thread.start()
        while thread.is_alive() and not stop.wait(0.25):
            pass
        server.should_exit = True
        thread.join()
    return stop.status if stop.is_set() else 1
