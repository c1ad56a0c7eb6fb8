"""Choosing tokens with min_p and penalties, against transformers' processors and OpenAI's formula."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from netcl import models
from netcl.core.tensor import Tensor
from netcl.nn.decoding import Sampling, token_counts

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "sampling.json").read_text(encoding="utf-8"))
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def penalized(logits, prompt, made, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
    """The definitions: transformers' RepetitionPenaltyLogitsProcessor over prompt and text, OpenAI's formula over the text."""
    logits = logits.astype(np.float64)
    for token in {*prompt, *made}:
        logits[token] = logits[token] * repetition_penalty if logits[token] < 0 else logits[token] / repetition_penalty
    for token in set(made):
        logits[token] -= presence_penalty + frequency_penalty * made.count(token)
    return logits


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("case", range(len(GOLDEN["cases"])))
def test_distributions_are_those_of_transformers(case, by_row, queue):
    options, wanted = GOLDEN["cases"][case]["options"], np.array(GOLDEN["cases"][case]["probabilities"])
    logits, ids = np.array(GOLDEN["logits"], np.float32), GOLDEN["ids"]
    rows, drawn, expected = [], [], []
    for row, shares in enumerate(wanted):
        order = np.argsort(-shares, kind="stable")[: np.count_nonzero(shares)]
        ends = shares[order].cumsum()
        for token, begin, end in zip(order, [0, *ends[:-1]], ends, strict=True):  # near both ends of the numbers that choose a token
            inset = min(1e-3, (end - begin) / 4)
            rows, drawn, expected = rows + [row] * 2, [*drawn, begin + inset, end - inset], expected + [token] * 2
    sampling = Sampling(**options)
    if by_row:
        neutral = {"top_k": 20.0, "top_p": 1.0, "min_p": 0.0}
        numbers = [float(neutral.get(name) if value is None else value) for name, value in sampling._asdict().items()]
        sampling = Sampling(*(Tensor.from_host(queue, np.full((len(rows), 1), number, np.float32)) for number in numbers))
    counts = Tensor.from_host(queue, token_counts([ids[row] for row in rows], 20)) if case > 1 else None
    given = Tensor.from_host(queue, logits[rows]), Tensor.from_host(queue, np.array(drawn, np.float32))
    assert sampling.choose(*given, counts).to_host()[:, 0].tolist() == expected
    if not by_row and case < 2:
        np.testing.assert_allclose(sampling.probabilities(np.array(GOLDEN["logits"])), wanted, atol=1e-6)


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_temperature_per_row_needs_no_top_k_per_row(top_k, queue, rng):
    logits, drawn = rng.standard_normal((12, 20)).astype(np.float32), rng.random(12).astype(np.float32)
    temperatures = np.linspace(0.2, 3.0, 12, dtype=np.float32)
    given = [Tensor.from_host(queue, a) for a in (logits, drawn)]
    chosen = Sampling(Tensor.from_host(queue, temperatures[:, None]), top_k).choose(*given).to_host()[:, 0]
    for row, temperature in enumerate(temperatures):
        one = [Tensor.from_host(queue, a[row : row + 1]) for a in (logits, drawn)]
        assert chosen[row] == Sampling(float(temperature), top_k).choose(*one).item()


def test_a_repetition_penalty_writes_the_tokens_of_transformers(device, folder_of):
    row, model = GOLDEN["llama"], models.load(folder_of("llama"), device.queue)
    prompt = json.loads((Path(__file__).parent.parent / "golden" / "models.json").read_text(encoding="utf-8"))["llama"]["ids"][0]
    assert model.generate(prompt, len(row["tokens"]), repetition_penalty=row["repetition_penalty"]) == row["tokens"]


def test_penalties_follow_their_definitions(device, folder_of):
    model = models.load(folder_of("llama"), device.queue)
    prompts, new = [[5, 9, 9, 31], [7, 2]], 14
    expected = []
    for prompt in prompts:
        made: list[int] = []
        for _ in range(new):
            logits = model(Tensor.from_host(device.queue, np.array([prompt + made], np.int64))).to_host()[0, -1]
            made.append(int(penalized(logits, prompt, made, **PENALTIES).argmax()))
        expected.append(made)
    assert [model.generate(prompts, new, **PENALTIES) for _ in range(2)] == [expected] * 2  # the second call begins to count anew
    plain = model.generate(prompts, new)
    assert plain != expected and model.generate(prompts, new, presence_penalty=0, frequency_penalty=0.0) == plain


def test_a_temperature_that_float32_rounds_to_zero_is_zero(device, folder_of):
    model = models.load(folder_of("llama"), device.queue)
    assert model.generate([1, 2, 3], 5, temperature=1e-50) == model.generate([1, 2, 3], 5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_choose_no_token(value, device, folder_of):
    good, broken = (models.load(folder_of("llama"), device.queue) for _ in range(2))
    broken.norm.weight.write(np.full(broken.norm.weight.shape, value, np.float32))
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"draft": good}, {"draft": good, "temperature": 1.0}):
        with pytest.raises(ValueError, match=r"\[generate\] the logits must be finite; check the weights for NaN"):
            broken.generate([1, 2, 3], 4, **options)


def test_logits_that_are_not_finite_after_the_prompt_raise(device, folder_of):
    good, broken = (models.load(folder_of("llama"), device.queue) for _ in range(2))
    made = good.generate([1, 2, 3], 6)
    at = next(i for i in range(1, 5) if made[i] not in [1, 2, 3, *made[:i]])
    rows = broken.embed_tokens.weight.to_host()
    rows[made[at]] = np.nan
    broken.embed_tokens.weight.write(rows)
    assert broken.generate([1, 2, 3], at + 1) == made[: at + 1]
    for options in ({}, {"presence_penalty": 0.001}, {"temperature": 1e-9}, {"temperature": 1e-9, "top_k": 3}, {"draft": good}):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"\[generate\] the logits must be finite"):
                broken.generate([1, 2, 3], 6, **options)
    with pytest.raises(ValueError, match=r"\[generate\] the logits must be finite"):
        broken.generate([[1, 2, 3], [1, 2, 3]], 6)
    streamed = broken.generate([1, 2, 3], 6, stream=True)
    assert [next(streamed) for _ in range(at + 1)] == made[: at + 1]
    with pytest.raises(ValueError, match=r"\[generate\] the logits must be finite"):
        next(streamed)
    assert good.generate([1, 2, 3], 6) == made


def test_options_that_mean_nothing_are_refused(folder_of):
    model = models.load(folder_of("llama"), "cpu")
    for wrong in (
        {"top_k": 2.5}, {"top_k": 0}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model.generate([1, 2], 2, **wrong)
    for most in (-1, 2.5):
        with pytest.raises(ValueError, match=r"\[generate\] max_new_tokens must be an integer of at least 0; max_new_tokens="):
            model.generate([1, 2], most)
    with pytest.raises(ValueError, match="draft cannot be combined with penalties"):
        model.generate([1, 2], 2, draft=model, presence_penalty=0.5)
