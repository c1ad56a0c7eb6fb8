"""Converts texts and conversations to blocks of tokens for fine-tuning, and marks the tokens that the loss counts."""

from __future__ import annotations

import json
import os
import warnings
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.core.errors import message
from netcl.io.archive import refusal, refusing, regular_file
from netcl.models.tokenizer import Tokenizer

IGNORED_TARGET = -100  # what cross-entropy leaves out
_ROW_FORMS = '{"messages": [...]}, {"prompt": ..., "completion": "..."}, {"text": "..."} or {"prompt": ..., "chosen": ..., "rejected": ...}'
_KEYS_OF_ROWS = ({"messages"}, {"prompt", "completion"}, {"text"}, {"prompt", "chosen", "rejected"})
_KEYS = set().union(*_KEYS_OF_ROWS)


class Document(NamedTuple):
    """A tokenized text: its ``ids``, and a flag ``learned`` for each id: whether the loss counts the id."""

    ids: list[int]
    learned: list[bool]


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file: conversations, prompts with completions, texts, or prompts with a chosen and a rejected answer."""
    rows = []
    for number, line in enumerate(Path(regular_file(path, "finetune")).read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            with refusing("finetune", f"{path}, line {number}", (ValueError, RecursionError)):
                rows.append(json.loads(line))
            if not _is_row(rows[-1]):
                raise refusal("finetune", f"a row must be {_ROW_FORMS}", file=path, line=number)
            if (known := {key for key in _KEYS if rows[-1].get(key) is not None}) not in _KEYS_OF_ROWS:
                what, remedy = f"a row must have the keys of one form, got {', '.join(sorted(known))}", f"a row is {_ROW_FORMS}"
                raise refusal("finetune", what, remedy, file=path, line=number)
    if not rows:
        raise refusal("finetune", "the data must have at least one row", file=path)
    if len({is_preference(row) for row in rows}) > 1:
        raise refusal("finetune", "rows with chosen and rejected answers must not be mixed with others", "use two files", file=path)
    return rows


def is_preference(row: Mapping[str, Any]) -> bool:
    """Whether a row compares two answers."""
    return "chosen" in row and "rejected" in row


def _is_row(row: Any) -> bool:
    if isinstance(row, dict) and is_preference(row):
        prompt, *answers = row.get("prompt"), row["chosen"], row["rejected"]
        if isinstance(prompt, str):
            return all(isinstance(answer, str) for answer in answers)
        talks: list[Any] = [prompt + _as_messages(answer) if isinstance(prompt, list) else [] for answer in answers]
        whole = all(_is_row({"messages": talk}) and talk[-1]["role"] == "assistant" for talk in talks)
        return whole and all(_as_messages(answer)[:1] and _as_messages(answer)[0]["role"] == "assistant" for answer in answers)
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        rows = [m if isinstance(m, dict) and (isinstance(m.get("content"), str) or m.get("tool_calls")) else {} for m in row["messages"]]
        roles = [m.get("role") for m in rows]
        return "assistant" in roles[1:] and roles[0] != "assistant" and all(isinstance(role, str) for role in roles)
    forms = (("text",), ("prompt", "completion"))
    return isinstance(row, dict) and any(all(isinstance(row.get(key), str) for key in form) for form in forms)


def documents_of(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[Document]:
    """Return the documents of a row. In a text, all tokens are learned; in a conversation or prompt, only the answers.

    A conversation is one document, or one for each answer if the template renders earlier answers differently from the last.
    """
    if "messages" in row:
        return list(_conversation(tokenizer, row["messages"]))
    prompt, answer = ("", row["text"]) if "text" in row else (row["prompt"], row["completion"])
    before, ids, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer, prompt + answer))
    if whole[: len(before)] == before:  # SentencePiece would begin an answer that is encoded alone with a space
        ids = whole[len(before) :]
    before = [*(i for i in tokenizer.encode("") if i not in tokenizer.end_tokens), *before]
    ids = [*before, *ids, *tokenizer.end_tokens[:1]]
    return [Document(ids, ["text" in row or at >= len(before) for at in range(len(ids))])]


def _as_messages(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]


def preference_of(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[Document, Document]:
    """Return the chosen and the rejected answer of a row, each as one document with its prompt."""
    if isinstance(row["prompt"], str):
        made = (documents_of(tokenizer, {"prompt": row["prompt"], "completion": row[name]})[-1] for name in ("chosen", "rejected"))
    else:
        whole = (row["prompt"] + _as_messages(row[name]) for name in ("chosen", "rejected"))
        made = (list(_conversation(tokenizer, messages))[-1] for messages in whole)
    chosen, rejected = made
    return chosen, rejected


def _conversation(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> Iterator[Document]:
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    spans, texts = [], []
    for i in answers:
        before, plain = (tokenizer.apply_chat_template(messages[:i], False, add_generation_prompt=prompts) for prompts in (True, False))
        texts.append(text := tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, add_generation_prompt=False))
        start, content = _shared(before, text), (messages[i].get("content") or "").strip()
        if content and start < len(before):  # a prompt that opens a thought may go on like the answer: <think> and <tool_call>
            found = text.find(content, _shared(plain, text))
            start = found if 0 <= found < start else start
        spans.append((start, len(text)))
    together = all(texts[-1].startswith(text) for text in texts)
    for text, own in [(texts[-1], spans)] if together else [(text, [span]) for text, span in zip(texts, spans, strict=True)]:
        made = tokenizer.backend.encode(text, add_special_tokens=False)
        learned = [False] * len(made.ids)
        for start, end in own:
            for at in _until_end(tokenizer, made.ids, [at for at, (begin, _) in enumerate(made.offsets) if start <= begin < end]):
                learned[at] = True
        yield Document(list(made.ids), learned)


def _shared(one: str, two: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _until_end(tokenizer: Tokenizer, ids: Sequence[int], inside: list[int]) -> list[int]:
    """Return the positions of an answer's tokens without the white space that the template puts after its end token."""
    special = tokenizer.backend.get_added_tokens_decoder()
    last = max((at for at in inside if ids[at] in special), default=len(ids))
    behind = tokenizer.decode([ids[at] for at in inside if at > last], skip_special_tokens=False)
    return inside if behind.strip() else [at for at in inside if at <= last]


def pack_documents(documents: Sequence[Document], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into blocks, the longest first, each into the fullest block with room; returns inputs and targets.

    Inputs ``(blocks, 3, length)``: ids, document numbers (0 for padding), positions in the document. Targets ``(blocks, length)``: the id
    that follows, or :data:`IGNORED_TARGET`. A document longer than ``length`` is split into several if all its tokens are learned, else cut
    after ``length`` tokens. Parts in which no token after the first is learned are dropped. Warnings count
    documents that are cut, and documents that lose all their parts.
    """
    pieces, lost = list[Document](), Counter[str]()
    for ids, learned in documents:
        starts = range(0, len(ids), length) if all(learned) else (0,)
        parts = [Document(ids[at : at + length], learned[at : at + length]) for at in starts]
        kept = [part for part in parts if any(part.learned[1:])]
        lost["cut" if kept else "left out, because they have no tokens to learn"] += not kept or (len(ids) > length and not all(learned))
        pieces += kept
    if not pieces:
        raise ValueError(message("finetune", "at least one document must have a token to learn", "raise length or add text", length=length))
    for what in filter(lost.get, lost):
        warnings.warn(message("finetune", f"{lost[what]} documents are {what}", "raise the block length", length=length), stacklevel=2)
    pieces.sort(key=lambda piece: -len(piece.ids))
    room: list[tuple[int, int]] = []  # positions left, number of the block
    blocks: dict[int, list[Document]] = {}
    for piece in pieces:
        at = bisect_left(room, (len(piece.ids), 0))
        left, block = room.pop(at) if at < len(room) else (length, len(blocks))
        blocks.setdefault(block, []).append(piece)
        insort(room, (left - len(piece.ids), block))
    return _as_arrays(list(blocks.values()), length)


def preference_blocks(pairs: Sequence[tuple[Document, Document]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs ``(pairs, 2, 3, length)`` and targets ``(pairs, 2, length)``: a block per answer, the chosen answer first.

    Blocks are as in :func:`pack_documents`. Pairs with an empty answer, or with a prompt and answer longer than ``length``, are left out.
    """
    kept = [pair for pair in pairs if all(len(ids) <= length and any(learned[1:]) for ids, learned in pair)]
    if not kept:
        what = "at least one pair of answers must fit into blocks and have tokens to learn"
        raise ValueError(message("finetune", what, "raise the block length, or fill in empty answers", length=length))
    if len(kept) < len(pairs):
        what = f"{len(pairs) - len(kept)} pairs with long or empty answers are left out"
        warnings.warn(message("finetune", what, "raise the block length, or fill in empty answers", length=length), stacklevel=2)
    inputs, targets = _as_arrays([[document] for pair in kept for document in pair], length)
    return inputs.reshape(-1, 2, 3, length), targets.reshape(-1, 2, length)


def _as_arrays(blocks: Sequence[Sequence[Document]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of blocks, as :func:`pack_documents` describes them."""
    inputs = np.zeros((len(blocks), 3, length), np.int32)
    targets = np.full((len(blocks), length), IGNORED_TARGET, np.int32)
    for block, parts in enumerate(blocks):
        at = 0
        for number, (ids, learned) in enumerate(parts, 1):
            end = at + len(ids)
            inputs[block, :, at:end] = ids, [number] * len(ids), range(len(ids))
            targets[block, at : end - 1] = np.where(learned[1:], ids[1:], IGNORED_TARGET)
            at = end
    return inputs, targets
