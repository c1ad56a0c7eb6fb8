"""Continuous batching, without a thread: rounds are taken one by one."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.nn.decoding import Sampling
from netcl.serve import Batcher, ServeLimits, TextRequest
from netcl.serve.batching import ServeError
from tests.serve.conftest import run_rounds

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
