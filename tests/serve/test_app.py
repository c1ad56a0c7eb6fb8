"""The HTTP application: answers, streams, limits, errors, the key, metrics, the page."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from netcl.serve import Batcher, ServeLimits, make_app
from netcl.serve import app as serve_app
from tests.serve.conftest import talk

pytest.importorskip("httpx")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = ["Hello", "A", "The sky is blue", "12 + 30 = ", "zz", "Why?", "one two three four five", "#"]


@pytest.fixture
def app(host_model):
    with Batcher(host_model, ServeLimits(batch=3, tokens=64)) as batcher:
        yield make_app(batcher, "tiny")


def post(path, **fields):
    return "POST", path, {"json": fields}


def events_of(reply):
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_concurrent_requests_of_unlike_lengths_get_their_own_answers(model):
    lengths = [12, 30, 7, 1, 22, 16, 9, 25]
    expected = [model.generate(prompt, most) for prompt, most in zip(PROMPTS, lengths, strict=True)]
    with Batcher(model) as batcher:
        calls = [post(TEXT, prompt=prompt, max_tokens=most, temperature=0) for prompt, most in zip(PROMPTS, lengths, strict=True)]
        replies = talk(make_app(batcher, "tiny"), *calls)
    answers = [reply.json() for reply in replies]
    assert [answer["choices"][0]["text"] for answer in answers] == expected
    assert [answer["usage"]["completion_tokens"] for answer in answers] == lengths
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(prompt) for prompt in PROMPTS]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}


def test_chat_applies_the_template_and_streams_are_the_answer_in_pieces(app, host_model):
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    same = {"messages": messages, "max_tokens": 20, "seed": 4, "temperature": 1.3, "model": "tiny"}
    whole, streamed = talk(app, post(CHAT, **same), post(CHAT, **same, stream=True, stream_options={"include_usage": True}))
    ids = host_model.tokenizer.encode("s:Be brief;u:Hi;a:")
    answer = whole.json()
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
    text = answer["choices"][0]["message"]["content"]
    assert text == host_model.tokenizer.decode(host_model.generate(ids, 20, temperature=1.3, seed=4))
    events = events_of(streamed)
    assert events[0]["object"] == "chat.completion.chunk" and events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == text
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1]["usage"] == answer["usage"] and len({event["id"] for event in events}) == 1


def test_completions_take_ids_stop_strings_and_streams(app, host_model):
    whole = host_model.generate("Hello", 30)
    stop = whole[12:14]
    cut = whole[: whole.index(stop)]
    same = {"prompt": host_model.tokenizer.encode("Hello"), "max_tokens": 30, "temperature": 0, "stop": stop}
    plain, streamed = talk(app, post(TEXT, **same), post(TEXT, **same, stream=True))
    assert plain.json()["choices"] == [{"index": 0, "text": cut, "logprobs": None, "finish_reason": "stop"}]
    assert "".join(event["choices"][0]["text"] for event in events_of(streamed)) == cut
    (penalized,) = talk(app, post(TEXT, prompt="Hello", max_tokens=20, temperature=0, frequency_penalty=1.5, repetition_penalty=1.3))
    assert penalized.json()["choices"][0]["text"] == host_model.generate("Hello", 20, frequency_penalty=1.5, repetition_penalty=1.3)


def test_embeddings(app):
    reply, one = talk(app, post("/v1/embeddings", input=["Hello", [3, 4, 5]]), post("/v1/embeddings", input="Hello"))
    rows = reply.json()["data"]
    assert [row["index"] for row in rows] == [0, 1] and {len(row["embedding"]) for row in rows} == {32}
    assert one.json()["data"][0]["embedding"] == rows[0]["embedding"] and reply.json()["usage"]["prompt_tokens"] == 8


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "fields", "status", "told"),
    [
        (CHAT, {}, 400, "messages is required"),
        (CHAT, {"messages": []}, 400, "messages must be"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages must be"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages must be"),
        (CHAT, {"messages": HI, "model": "gpt-4"}, 404, "unknown model 'gpt-4'; this server has"),
        (CHAT, {"messages": HI, "temperature": "hot"}, 400, "temperature must be"),
        (CHAT, {"messages": HI, "temperature": True}, 400, "temperature must be"),
        (CHAT, {"messages": HI, "top_p": 0}, 400, "top_p must be"),
        (CHAT, {"messages": HI, "min_p": 2}, 400, "min_p must be"),
        (CHAT, {"messages": HI, "presence_penalty": 3}, 400, "presence_penalty must be"),
        (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens must be"),
        (CHAT, {"messages": HI, "max_tokens": 65}, 400, "max_tokens (or max_completion_tokens) must be at most 64, got 65"),
        (CHAT, {"messages": HI, "stop": [1]}, 400, "stop must be"),
        (CHAT, {"messages": HI, "stream": "yes"}, 400, "stream must be"),
        (CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": "no"}}, 400, "stream_options must be"),
        (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream_options requires stream=true"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400, "messages must be"),
        (CHAT, {"messages": HI, "n": 2}, 400, "n=2 is not supported"),
        (CHAT, {"messages": HI, "n": True}, 400, "n=True is not supported"),
        (TEXT, {"prompt": "a", "logprobs": 0}, 400, "logprobs=0 is not supported"),  # it asks for those of the chosen tokens
        (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools=[{}] is not supported"),
        (CHAT, {"messages": HI, "temprature": 1}, 400, "unknown field 'temprature'"),
        (TEXT, {"prompt": ["a", "b"]}, 400, "prompt must be"),
        (TEXT, {"prompt": "x" * 128, "max_tokens": 1}, 400, "at most 128 tokens together with its answer; prompt=128, answer=1"),
        (TEXT, {"prompt": [96]}, 400, "token ids must be from 0 to 95; lowest=96, highest=96"),
        (TEXT, {"prompt": "\ud800"}, 400, "prompt must be"),
        ("/v1/embeddings", {"input": []}, 400, "input must be"),
        ("/v1/embeddings", {"input": "a", "stream": True}, 400, "unknown field 'stream'; known are encoding_format, input, model"),
        (TEXT, {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 1}, 400, "must not both be given"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_malformed_requests_are_refused_in_openai_s_form(app, path, fields, status, told):
    (reply,) = talk(app, ("POST", path, {"content": json.dumps(fields), "headers": {"content-type": "application/json"}}))
    error = reply.json()["error"]
    assert reply.status_code == status and told in error["message"] and error["type"] == "invalid_request_error"
    assert error["code"] == ("model_not_found" if "model" in fields else None)


def test_bodies_that_are_not_json_objects_are_refused(app):
    head = {"headers": {"content-type": "application/json"}}
    bodies = [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "' + b"x" * (9 << 20) + b'"}']
    replies = talk(
        app, *[("POST", TEXT, {"content": body, **head}) for body in bodies], ("POST", TEXT, {"content": b"{}"}), ("GET", TEXT, {})
    )
    assert [reply.status_code for reply in replies] == [400, 400, 400, 400, 413, 415, 405]
    assert all(reply.json()["error"]["message"] for reply in replies)


@pytest.mark.parametrize("gone", [False, True])
def test_a_body_that_does_not_arrive_ends_the_request(app, gone, monkeypatch):
    monkeypatch.setattr(serve_app, "BODY_SECONDS", 0.05)
    sent = []

    async def call():
        asked = iter([{"type": "http.request", "body": b"{", "more_body": True}, *([{"type": "http.disconnect"}] if gone else [])])

        async def receive():
            return next(asked, None) or await asyncio.sleep(60)

        async def send(event):
            sent.append(event)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "query_string": b"", "headers": headers}
        await asyncio.wait_for(app(scope, receive, send), 10)

    asyncio.run(call())
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]


def test_a_full_queue_is_429_and_a_late_answer_504(host_model):
    batcher = Batcher(host_model, ServeLimits(batch=1, queue=1))
    app = make_app(batcher, "tiny")
    batcher.waiting.append(None)  # somebody waits, and nobody works
    (reply,) = talk(app, post(TEXT, prompt="Hello"))
    assert reply.status_code == 429 and reply.json()["error"]["type"] == "rate_limit_error" and reply.headers["retry-after"] == "1"
    with Batcher(host_model, ServeLimits(timeout=0.0)) as late:
        whole, streamed = talk(make_app(late, "tiny"), post(TEXT, prompt="Hello"), post(TEXT, prompt="Hello", stream=True))
    assert whole.status_code == 504 and "took longer than the timeout" in whole.json()["error"]["message"]
    last = events_of(streamed)[-1]  # tokens may have come before the limit was read
    assert last["error"]["type"] == "server_error" and "took longer than the timeout" in last["error"]["message"]


def test_the_key_is_asked_for(host_model):
    with Batcher(host_model) as batcher:
        app = make_app(batcher, "tiny", key="secret", hosts=["localhost"])
        keys = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "bearer Secret"},
                {"Authorization": "Bearer secret"}, {"Authorization": "bearer secret"}]  # fmt: skip
        replies = talk(app, *[("GET", path, {"headers": key}) for path in ("/v1/models", "/metrics") for key in keys],
                       ("GET", "/health", {}), ("GET", "/", {}), ("GET", "/health", {"headers": {"host": "evil.example"}}))  # fmt: skip
    assert [reply.status_code for reply in replies] == [401, 401, 401, 401, 200, 200] * 2 + [200, 200, 400]
    assert replies[0].json()["error"]["type"] == "authentication_error" and replies[4].json()["data"][0]["id"] == "tiny"
    assert replies[0].headers["www-authenticate"] == "Bearer"


def test_metrics_count_requests_tokens_and_latencies(app):
    talk(app, post(TEXT, prompt="Hello", max_tokens=7, temperature=0), post(TEXT, prompt=5), ("GET", "/nothing/at/all", {}))
    (reply,) = talk(app, ("GET", "/metrics", {}))
    values = dict(line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#"))
    assert values['netcl_requests_total{path="/v1/completions",status="200"}'] == "1"
    assert values['netcl_requests_total{path="/v1/completions",status="400"}'] == "1"
    assert values['netcl_requests_total{path="other",status="404"}'] == "1"
    assert (values["netcl_prompt_tokens_total"], values["netcl_generated_tokens_total"]) == ("5", "7")
    assert (values["netcl_queue_length"], values["netcl_running_sequences"]) == ("0", "0")
    assert values["netcl_first_token_seconds_count"] == values["netcl_answer_seconds_count"] == "1"


def test_the_page_needs_nothing_from_elsewhere(app):
    (reply,) = talk(app, ("GET", "/", {}))
    assert reply.status_code == 200 and "default-src 'none'" in reply.headers["content-security-policy"]
    assert "v1/chat/completions" in reply.text and not re.search(r"https?://|src=|@import|<link", reply.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(host_model, stream):
    """The batcher has no thread, so that the request is still waiting when the client leaves."""
    batcher = Batcher(host_model)
    app = make_app(batcher, "tiny")
    body = json.dumps({"prompt": "Hello", "stream": stream}).encode()

    async def leave():
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            return next(asked, {"type": "http.disconnect"})

        async def send(event):
            pass

        scope = {
            "type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "query_string": b"", "scheme": "http",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(leave())
    (request,) = batcher.waiting
    assert request.cancelled
    batcher.turn()
    assert not batcher.waiting and batcher.running == 0


def test_the_lifespan_starts_and_ends_the_batcher(host_model):
    batcher = Batcher(host_model)
    app = make_app(batcher, "tiny")

    async def live():
        async with app.router.lifespan_context(app):
            assert batcher.closing is None

    asyncio.run(live())
    (reply,) = talk(app, ("GET", "/health", {}))
    assert reply.status_code == 503 and batcher.closing is not None
