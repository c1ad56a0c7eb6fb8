"""Continuous batching, without a thread: rounds are taken one by one."""

from __future__ import annotations

import numpy as np
import pytest

from netcl import models
from netcl.core.tensor import Tensor
from netcl.nn.decoding import Sampling
from netcl.serve import Batcher, ServeLimits, TextRequest, batching
from netcl.serve.batching import ServeError
from tests.serve.conftest import CONFIG, run_rounds

PROMPTS = ["Hello", "A", "The sky is blue", "12 + 30 = ", "zz", "Why?", "one two three four five", "#"]


def ask(batcher, prompt, most, **options):
    """Submit a prompt; returns the request and the list that fills with its parts."""
    parts = []
    request = TextRequest(batcher.model.tokenizer.encode(prompt), most, parts.append, **options)
    batcher.submit(request)
    return request, parts


def text_of(parts):
    assert parts[-1].finish and not any(part.error for part in parts)
    return "".join(part.text for part in parts)


def test_greedy_answers_are_those_of_generate(model):
    lengths = [12, 30, 7, 1, 22, 16, 9, 25]
    expected = [model.generate(prompt, most) for prompt, most in zip(PROMPTS, lengths, strict=True)]
    batcher = Batcher(model, ServeLimits(batch=3))
    answers = [ask(batcher, prompt, most)[1] for prompt, most in zip(PROMPTS, lengths, strict=True)]
    run_rounds(batcher)
    assert [text_of(parts) for parts in answers] == expected
    assert batcher.running == 0 and not batcher.waiting
    _, again = ask(batcher, "Hello", 12)  # slots are used again
    run_rounds(batcher)
    assert text_of(again) == expected[0]


def test_waiting_prompts_join_in_one_round_as_far_as_slots_and_tokens_allow(host_model, monkeypatch):
    expected = [host_model.generate(prompt, 6) for prompt in PROMPTS]
    monkeypatch.setattr(batching, "_JOINED_TOKENS", 3 * len(host_model.tokenizer.encode(PROMPTS[2])))
    batcher = Batcher(host_model, ServeLimits(batch=6))
    answers = [ask(batcher, prompt, 6)[1] for prompt in PROMPTS]
    batcher.turn()
    assert (batcher.running, len(batcher.waiting)) == (3, 5) and [len(parts) for parts in answers[:4]] == [2, 2, 2, 0]
    batcher.turn()
    assert batcher.running == 6
    run_rounds(batcher)
    assert [text_of(parts) for parts in answers] == expected


def test_sampled_answers_follow_their_own_seed_and_options(model):
    """Rows of one batch have settings of their own; greedy ones stay greedy beside them."""
    rows = [
        {"temperature": 1.5, "seed": 3}, {"temperature": 0.0, "seed": 1}, {"temperature": 1.2, "top_k": 4, "seed": 7},
        {"temperature": 0.9, "top_p": 0.8, "seed": 2}, {"temperature": 2.0, "top_k": 1, "seed": 9},
        {"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 2},
    ]  # fmt: skip
    expected = [model.generate("Hello", 15, **row) for row in rows]
    batcher = Batcher(model, ServeLimits(batch=4))
    answers = [ask(batcher, "Hello", 15, seed=row.pop("seed"), sampling=Sampling(**row))[1] for row in [dict(r) for r in rows]]
    run_rounds(batcher)
    assert [text_of(parts) for parts in answers] == expected
    assert len({*expected}) > 3 and expected[4] == expected[1]


def test_stop_strings_and_end_tokens_end_an_answer(host_model):
    whole = host_model.generate("Hello", 40)
    stop = whole[8:10]
    batcher = Batcher(host_model)
    _, stopped = ask(batcher, "Hello", 40, stops=[stop])
    batcher.ends.add(host_model.tokenizer.encode(whole[5])[0])
    run_rounds(batcher)
    assert text_of(stopped) == whole[: min(whole.index(whole[5]), whole.index(stop))] and stopped[-1].finish == "stop"


def test_a_cancelled_request_frees_its_slot(host_model):
    expected = host_model.generate("Why?", 5)
    batcher = Batcher(host_model, ServeLimits(batch=1))
    first, parts = ask(batcher, "Hello", 100)
    _, second = ask(batcher, "Why?", 5)
    third, never = ask(batcher, "zz", 5)
    batcher.turn()
    assert batcher.slots == [first] and len(batcher.waiting) == 2
    first.cancelled = True
    third.cancelled = True
    told = len(parts)
    run_rounds(batcher)
    assert text_of(second) == expected and len(parts) == told and never == []
    assert 'netcl_answers_total{outcome="cancelled"} 2' in batcher.metrics.text(0, 0)


def test_requests_end_at_their_deadline_whether_they_run_or_wait(host_model):
    now = [0.0]
    batcher = Batcher(host_model, ServeLimits(batch=1, timeout=5.0), clock=lambda: now[0])
    _, running = ask(batcher, "Hello", 100)
    _, waiting = ask(batcher, "Why?", 5)
    batcher.turn()
    assert batcher.running == 1 and not running[-1].finish
    now[0] = 5.0
    batcher.turn()
    assert [parts[-1].error.status for parts in (running, waiting)] == [504, 504]
    assert batcher.running == 0 and not batcher.waiting


def test_what_does_not_fit_is_refused(host_model):
    batcher = Batcher(host_model, ServeLimits(batch=1, queue=2, context=20))
    for prompt, most in (("x" * 16, 5), ("", 5)):
        with pytest.raises(ServeError, match="at most 20") as refused:
            ask(batcher, prompt, most)
        assert refused.value.status == 400
    answers = [ask(batcher, "x" * 16, 4)[1], ask(batcher, "Hello", 15)[1]]
    with pytest.raises(ServeError, match="the request queue is full") as refused:
        ask(batcher, "Hello", 2)
    assert refused.value.status == 429
    run_rounds(batcher)
    assert [parts[-1].finish for parts in answers] == ["length", "length"]


def test_a_full_context_does_not_disturb_those_beside_it(model):
    """A prompt as long as the context that ends with its first token, beside sequences that go on."""
    expected = model.generate("Hello", 14)
    batcher = Batcher(model, ServeLimits(batch=2, context=20))
    _, going = ask(batcher, "Hello", 14)
    batcher.turn()
    others = [ask(batcher, "x" * 19, 1)[1] for _ in range(3)]
    run_rounds(batcher)
    assert text_of(going) == expected and all(parts[-1].finish == "length" for parts in others)


def test_a_model_that_fails_ends_its_requests_and_the_server_goes_on(host_model, monkeypatch):
    expected = host_model.generate("Hello", 4)
    batcher = Batcher(host_model, ServeLimits(batch=2))
    _, running = ask(batcher, "Hello", 20)
    batcher.turn()

    def fail(*_):
        raise MemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(batcher._cache, "reserve", fail)
        batcher.turn()
    assert running[-1].error.status == 500 and "no memory left" in str(running[-1].error) and batcher.running == 0
    with monkeypatch.context() as patch:
        patch.setattr(host_model, "head", fail)
        _, prefilled = ask(batcher, "Hello", 20)
        batcher.turn()
    assert prefilled[-1].error.status == 500
    with monkeypatch.context() as patch:  # what an index out of range raises
        patch.setattr(batcher, "_step", lambda *_: [][0])
        _, running = ask(batcher, "Hello", 20)
        batcher.turn()
    assert running[-1].error.status == 500
    _, good = ask(batcher, "Hello", 4, sampling=Sampling(1e-50))
    run_rounds(batcher)
    assert text_of(good) == expected


def test_only_requests_whose_logits_are_not_finite_fail(host_model, monkeypatch):
    expected, prompt_logits = host_model.generate("Hello", 4), batching.prompt_logits

    def spoiled(*given):
        logits = prompt_logits(*given).to_host().copy()
        logits[1] = np.nan
        return Tensor.from_host(host_model.queue, logits)

    monkeypatch.setattr(batching, "prompt_logits", spoiled)
    for temperature in (0.0, 1.0):
        batcher = Batcher(host_model)
        answers = [ask(batcher, "Hello", 4, sampling=Sampling(temperature, 1))[1] for _ in range(3)]
        run_rounds(batcher)
        assert [text_of(answers[i]) for i in (0, 2)] == [expected] * 2
        assert answers[1][-1].error.status == 500 and "logits must be finite" in str(answers[1][-1].error)


def test_only_requests_whose_logits_become_not_finite_fail(host_model):
    expected = host_model.generate("Hello", 4)
    for sampling in (Sampling(0.0), Sampling(1.0, 1)):
        batcher = Batcher(host_model)
        answers = [ask(batcher, "Hello", 4, sampling=sampling)[1] for _ in range(3)]
        batcher.turn()
        for values in [t for t in vars(batcher._cache).values() if isinstance(t, Tensor) and t.ndim == 4]:
            values[1] = np.nan
        run_rounds(batcher)
        assert [text_of(answers[i]) for i in (0, 2)] == [expected] * 2
        assert answers[1][-1].error.status == 500 and "logits must be finite" in str(answers[1][-1].error)


@pytest.mark.parametrize("kind", ["llama", "phi3"])  # phi3 computes a text again that outgrows the original context
def test_prompts_are_not_padded_where_frequencies_depend_on_the_length(kind, host_model):
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 4.0}
    scaled = {"model_type": kind, "rope_scaling": longrope, "original_max_position_embeddings": 30}
    model = models.CausalLM(models.read_config({**CONFIG, **scaled}))
    model.load_state_dict(host_model.state_dict())
    model.make_tokenizer = host_model.make_tokenizer
    batcher, prompts = Batcher(model.eval()), ["Hello", "x" * 28, "y" * 40]
    answers = [ask(batcher, prompt, 8)[1] for prompt in prompts]
    run_rounds(batcher)
    assert [text_of(parts) for parts in answers] == [model.generate(prompt, 8) for prompt in prompts]


def test_closing_lets_running_requests_finish_and_takes_no_more(host_model):
    expected = host_model.generate("Hello", 30)
    batcher = Batcher(host_model)
    with batcher:
        _, parts = ask(batcher, "Hello", 30)
        batcher.close(grace=300)
        assert text_of(parts) == expected
        with pytest.raises(ServeError, match="shutting down") as refused:
            ask(batcher, "Hello", 2)
        assert refused.value.status == 503


def test_closing_without_grace_ends_requests(host_model):
    batcher = Batcher(host_model, clock=lambda: 0.0)
    _, parts = ask(batcher, "Hello", 30)
    batcher.turn()
    with batcher:
        batcher.close(grace=0.0)
    assert parts[-1].error.status == 503 and batcher.running == 0


def test_embeddings_are_the_mean_of_the_last_states(model):
    from netcl.autograd import no_grad
    from netcl.core.tensor import Tensor

    ids = model.tokenizer.encode("The sky is blue")
    with no_grad():
        states = model.states(Tensor.from_host(model.queue, np.array([ids]))).to_host()
    batcher, parts = Batcher(model, ServeLimits(batch=1)), []
    ask(batcher, "Hello", 30)
    batcher.turn()
    batcher.submit(TextRequest(ids, 0, parts.append))
    batcher.turn()  # needs no slot
    assert batcher.running == 1
    np.testing.assert_allclose(parts[0].vector, states[0].mean(0), rtol=1e-5, atol=1e-5)
