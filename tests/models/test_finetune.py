"""Fine-tuning: what the loss counts, packing, resuming to the bit, the command from data to merged files."""

from __future__ import annotations

import json

import numpy as np
import pytest

import netcl
from netcl import models
from netcl.cli import main
from netcl.core.errors import DtypeError
from netcl.io import FileError
from netcl.models.tokenizer import Tokenizer
from netcl.models.tuning_data import IGNORED_TARGET, Document, documents_of, pack_documents, preference_blocks, preference_of, read_rows
from netcl.trainer import Callback
from netcl.trainer.finetune import TuningSettings, _tuning_blocks, finetune

tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("jinja2")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Earlier answers lose what stands in front of "=", as reasoning does in templates of models that think.
FORGETTING = TEMPLATE.replace("m.content", "m.content if loop.last or m.role != 'assistant' else m.content.split('=')[-1]")
TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "x=2"}, {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4\n"}]  # fmt: skip


def bytes_tokenizer(template=TEMPLATE):
    """A token for every byte, and four special ones behind."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights and a tokenizer, as a Hugging Face folder."""
    netcl.manual_seed(3)
    config = {"model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    model, tokenizer = models.CausalLM(models.read_config(config)), bytes_tokenizer()
    model.make_tokenizer = lambda: tokenizer
    path = tmp_path_factory.mktemp("base")
    models.save(model, path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"is {a + b}"}]}
            for a in range(4) for b in range(4)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shown(tokenizer, document):
    """The learned pieces of a document."""
    pieces, last = [], False
    for token, learned in zip(*document, strict=True):
        if learned:
            pieces = pieces if last else [*pieces, []]
            pieces[-1].append(token)
        last = learned
    return [tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]


def test_answers_alone_are_learned():
    tokenizer = bytes_tokenizer()
    (found,) = documents_of(tokenizer, {"messages": TALK})
    whole = "<|user|>1+1<|end|>\n<|assistant|>x=2<|end|>\n<|user|>2+2<|end|>\n<|assistant|>4\n<|end|>\n"
    assert tokenizer.decode(found.ids, skip_special_tokens=False) == whole
    assert shown(tokenizer, found) == ["x=2<|end|>", "4\n<|end|>"]
    prompt = tokenizer.apply_chat_template(TALK[:1])
    assert found.ids[: len(prompt)] == prompt and found.learned[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_template_that_renders_earlier_answers_differently():
    tokenizer = bytes_tokenizer(FORGETTING)
    first, second = documents_of(tokenizer, {"messages": TALK})
    assert shown(tokenizer, first) == ["x=2<|end|>"] and shown(tokenizer, second) == ["4\n<|end|>"]
    assert tokenizer.decode(second.ids).startswith("1+1\n2\n")


def test_answers_that_begin_like_the_generation_prompt_goes_on_are_learned_whole():
    tokenizer = bytes_tokenizer(TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif"))
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "<tool_call>1+1"}]
    (found,) = documents_of(tokenizer, {"messages": talk})
    assert shown(tokenizer, found) == ["<tool_call>1+1<|end|>"]


def test_prompts_and_texts():
    tokenizer = bytes_tokenizer()
    (found,) = documents_of(tokenizer, {"prompt": "1+1=", "completion": "2é"})
    assert shown(tokenizer, found) == ["2é<|end|>"] and tokenizer.decode(found.ids) == "1+1=2é"
    (found,) = documents_of(tokenizer, {"text": "ab"})
    assert all(found.learned) and found.ids[-1] == tokenizer.end_tokens[0] and len(found.ids) == 3


def test_an_end_token_of_the_configuration_alone_is_learned(folder, tmp_path):
    model, tokenizer = models.load(folder, "cpu"), bytes_tokenizer()
    model.config.source["eos_token_id"], plain = 256, Tokenizer(tokenizer.backend)
    model.make_tokenizer = lambda: plain
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n', encoding="utf-8")
    ((_, targets),), _ = _tuning_blocks(model, tmp_path / "rows.jsonl", TuningSettings(length=16, held_out=0.0))
    assert [int(token) for token in targets[0] if token != IGNORED_TARGET] == [*tokenizer.encode("2"), 256]


def test_an_answer_has_no_space_that_the_row_does_not_have():
    """As SentencePiece puts in front of a text."""
    vocabulary = {sign: i for i, sign in enumerate(["</s>", "\u2581", *"+=12"])}
    backend, norms = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])), tokenizers.normalizers
    backend.normalizer = norms.Sequence([norms.Prepend("\u2581"), norms.Replace(" ", "\u2581")])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    for answer, ids in (("2", [5, 0]), (" 2", [1, 5, 0])):
        (found,) = documents_of(tokenizer, {"prompt": "1+1=", "completion": answer})
        assert found.ids == [1, 4, 2, 4, 3, *ids] and found.learned == [False] * 5 + [True] * len(ids)


def test_lines_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_rows(path) == [{"text": "a\u2028b\x85c"}]


def test_packing():
    documents = [Document([1, 2, 3], [False, True, True]), Document([4, 5, 6, 7, 8], [False] * 3 + [True] * 2),
                 Document([9, 10], [True, True]), Document(list(range(20, 31)), [False] * 10 + [True])]  # fmt: skip
    with pytest.warns(UserWarning, match=r"\[finetune\] 1 documents are left out, because they have no tokens to learn; .*length=8"):
        inputs, targets = pack_documents(documents, 8)  # the only answer of the last document lies behind the block
    assert inputs.tolist() == [
        [[4, 5, 6, 7, 8, 1, 2, 3], [1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 0, 1, 2]],
        [[9, 10, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]],
    ]
    no = IGNORED_TARGET
    assert targets.tolist() == [[no, no, 7, 8, no, 2, 3, no], [10, no, no, no, no, no, no, no]]
    assert pack_documents([Document(list(range(10)), [True] * 10)], 4)[0][:, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    with pytest.warns(UserWarning, match=r"\[finetune\] 1 documents are cut; .*length=2"):
        assert pack_documents([Document([1, 2, 3], [False, True, True])], 2)[1].tolist() == [[2, no]]
    with pytest.raises(ValueError, match="at least one document must have a token to learn"):
        pack_documents([Document([1, 2], [False, False])], 4)


ASKED = [{"role": "user", "content": "a"}]
LISTED = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]}
REPEATED = {"prompt": ASKED, "chosen": [*ASKED, {"role": "assistant", "content": "b"}], "rejected": "c"}


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(LISTED),
        json.dumps(REPEATED),
        json.dumps(REPEATED | {"chosen": []}),
        json.dumps(REPEATED | {"prompt": [{"role": "user"}], "chosen": "b"}),
        "{",
        "[]",
        '{"prompt": "a"}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        "",
        '{"text": 1}',
    ],
)
def test_data_is_checked(line, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"\n{line}\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"\[finetune\].*(line=2|line 2|at least one row)"):
        read_rows(path)


SETTINGS = TuningSettings(rank=4, epochs=4, batch_size=2, accumulate=2, length=32, lr=0.02, held_out=0.25, seed=5)


class _Interrupted(Exception):
    pass


class _Interrupt(Callback):
    def on_train_batch_end(self, batch, logs):
        if self.trainer.step == 3 and self.trainer.at_boundary:
            raise _Interrupted


def test_resumed_run_ends_with_the_same_bits(folder, data, tmp_path):
    chosen = TuningSettings(**{**SETTINGS.__dict__, "dropout": 0.1, "save_every": 1, "checkpointing": True, "epochs": 3,
                              "optimizer": "adamw8bit"})  # fmt: skip
    finetune(folder, data, tmp_path / "straight", chosen)
    with pytest.raises(_Interrupted):
        finetune(folder, data, tmp_path / "stopped", chosen, callbacks=[_Interrupt()])
    with pytest.raises(FileError, match="checkpoints of another"):
        finetune(folder, data, tmp_path / "stopped", chosen)
    with pytest.raises(FileError, match=r"must keep its settings.*before={'lr': .*now={'lr': 0.1}"):
        finetune(folder, data, tmp_path / "stopped", TuningSettings(**{**chosen.__dict__, "lr": 0.1}), resume=True)
    finetune(folder, data, tmp_path / "stopped", chosen, resume=True)
    one, two = (safetensors.load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("straight", "stopped"))
    assert one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one)
    size = max(path.stat().st_size for path in (tmp_path / "straight" / "checkpoints").glob("*.netcl"))
    assert size < 3 * (folder / "model.safetensors").stat().st_size  # adapters and their two moments


def test_command_from_data_to_merged_model(folder, data, tmp_path, capsys):
    words = ["finetune", str(folder), "--data", str(data), "--out", str(tmp_path / "run"), "--rank", "4", "--epochs", "8",
             "--batch-size", "2", "--accumulate", "1", "--length", "32", "--lr", "0.02", "--held-out", "0.25", "--seed", "5"]  # fmt: skip
    assert main([*words, "--merge", "hf"]) == 0
    assert "val_perplexity" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    assert epochs[-1]["loss"] < 0.7 * epochs[0]["loss"] and epochs[-1]["val_perplexity"] < 0.5 * epochs[0]["val_perplexity"]
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    ids = np.arange(8)[None]
    adapted = models.load_adapter(models.load(folder), tmp_path / "run" / "adapter")(ids).to_host()
    merged = models.load(tmp_path / "run" / "merged")
    np.testing.assert_allclose(merged(ids).to_host(), adapted, atol=1e-4)
    assert np.abs(adapted - models.load(folder)(ids).to_host()).max() > 0.1 and merged.tokenizer.chat_template == TEMPLATE
    assert main(words) == 1 and "checkpoints of another" in capsys.readouterr().err
    assert main([*words, "--method", "full", "--overwrite", "--merge", "Q8_0"]) == 0
    packed, whole = (models.load(tmp_path / "run" / name)(ids).to_host() for name in ("merged.gguf", "model"))
    assert np.abs(packed - whole).max() < 0.1 * np.abs(whole).max()


def test_perplexity_is_that_of_the_held_out_answers(folder, data, tmp_path):
    found = finetune(folder, data, tmp_path, TuningSettings(**{**SETTINGS.__dict__, "epochs": 1, "lr": 0.0}))
    model, rows = models.load(folder), read_rows(data)
    total = count = 0.0
    for i in np.random.default_rng(5).permutation(16)[:4]:
        (document,) = documents_of(model.tokenizer, rows[i])
        logits = model([document.ids]).to_host()[0].astype(np.float64)
        chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for at, (token, learned) in enumerate(zip(document.ids[1:], document.learned[1:], strict=True)):
            total, count = total - learned * chances[at, token], count + learned
    assert found["val_perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)


def test_accumulated_batches_train_like_one_large_batch(folder, tmp_path):
    """Every learned token counts the same, in the step and in the loss, though blocks have different numbers of them."""
    data, found, losses = tmp_path / "chat.jsonl", [], []
    rows = [{"prompt": "a" * 3 * i, "completion": "b" * (41 - 13 * i)} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for batch, accumulate in ((4, 1), (1, 4), (2, 2)):
        chosen = TuningSettings(method="full", epochs=1, batch_size=batch, accumulate=accumulate, length=44, lr=0.01, warmup=0.0,
                                grad_clip=0.0, held_out=0.0, optimizer="adamw")  # fmt: skip
        last = finetune(folder, data, tmp_path / str(batch), chosen)
        losses += [last["loss"], np.log(last["perplexity"])]
        found.append(safetensors.load_file(tmp_path / str(batch) / "model" / "model.safetensors"))
    whole, *others = (np.concatenate([tensor.ravel() for _, tensor in sorted(tensors.items())]) for tensors in found)
    for parts in others:  # a first step of AdamW follows the sign of each gradient; the few near 0 may have either
        assert (np.abs(parts - whole) > 1e-3).mean() < 0.005
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.parametrize("change", [{"batch_size": 2, "accumulate": 2}, {"weight_decay": 5.0}], ids=["last batch", "decay"])
def test_pairs_of_a_smaller_batch_count_the_same_and_vectors_do_not_decay(change, folder, tmp_path):
    rows = [{"prompt": "a" * (n + 1), "chosen": "b" * (1 + 4 * n), "rejected": "c"} for n in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = {"method": "full", "epochs": 2, "batch_size": 3, "accumulate": 1, "lr": 0.01, "warmup": 0.0, "held_out": 0.0, "length": 32}
    found = []
    for name, more in (("plain", {}), ("changed", change)):
        finetune(folder, tmp_path / "pairs.jsonl", tmp_path / name, TuningSettings(**{**given, **more}), device_name="cpu")
        found.append(safetensors.load_file(tmp_path / name / "model" / "model.safetensors"))
    for name, before in found[0].items():
        same = np.abs(found[1][name] - before).max() < 2e-3
        assert same == ("weight_decay" not in change or before.ndim == 1)


def test_packed_base_follows_lora(folder, data, tmp_path):
    losses = [finetune(folder, data, tmp_path / method, TuningSettings(**{**SETTINGS.__dict__, "method": method}), merged="hf")["loss"]
              for method in ("lora", "qlora")]  # fmt: skip
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert (tmp_path / "qlora" / "merged" / "model.safetensors").is_file()


def log_chance(model, document):
    """The logarithm of the probability of a document's answer, by NumPy in float64."""
    logits = model([document.ids]).to_host()[0].astype(np.float64)
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return sum(chances[at, token] for at, token in enumerate(document.ids[1:]) if document.learned[at + 1])


@pytest.mark.parametrize("talk", [False, True], ids=["prompt", "messages"])
def test_chosen_answers_are_preferred(talk, folder, tmp_path):
    asked = [{"role": "user", "content": "2+2"}] if talk else "2+2="
    rows = [{"prompt": asked, "chosen": f"{n}", "rejected": f"no {n}"} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = {**SETTINGS.__dict__, "held_out": 0.0, "epochs": 1, "accumulate": 1, "batch_size": 6, "beta": 0.3}
    first = finetune(folder, tmp_path / "pairs.jsonl", tmp_path / "first", TuningSettings(**given))
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5)  # the model is the one it was
    last = finetune(folder, tmp_path / "pairs.jsonl", tmp_path / "last", TuningSettings(**{**given, "epochs": 6}))
    before, after = models.load(folder), models.load_adapter(models.load(folder), tmp_path / "last" / "adapter")
    pairs = [preference_of(before.tokenizer, row) for row in rows]
    margins = [sum(sign * (log_chance(after, d) - log_chance(before, d)) for sign, d in zip((1, -1), pair, strict=True)) for pair in pairs]
    again = finetune(folder, tmp_path / "pairs.jsonl", tmp_path / "again", TuningSettings(**{**given, "epochs": 6}))
    assert min(margins) > 0 and last["preference"] == 1.0 and again["loss"] == last["loss"]
    assert last["loss"] > np.mean(np.log1p(np.exp(-0.3 * np.array(margins)))) - 1e-4  # that of the step before the last


def test_the_reference_has_the_precision_of_the_run(folder, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "2+2=", "chosen": "4 is it", "rejected": "no"}), encoding="utf-8")
    given = {**SETTINGS.__dict__, "held_out": 0.0, "epochs": 1, "accumulate": 1, "batch_size": 1, "precision": "bfloat16"}
    found = finetune(folder, tmp_path / "pairs.jsonl", tmp_path / "run", TuningSettings(**given), device_name="cpu")
    assert found["loss"] == pytest.approx(np.log(2), rel=1e-6)  # before the first step the margin is 0


def test_pairs_with_an_empty_answer_are_left_out():
    whole, empty, short = Document([1, 2, 3], [False, False, True]), Document([], []), Document([1, 2], [False, False])
    with pytest.warns(UserWarning, match="2 pairs with long or empty answers are left out"):
        assert preference_blocks([(whole, whole), (empty, whole), (whole, short)], 8)[0].shape == (1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"\[finetune\] at least one pair of answers must fit"):
        preference_blocks([(whole, whole)], 2)


def test_pairs_of_answers_are_checked(folder, data, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(data.read_text(encoding="utf-8") + '{"prompt": "1", "chosen": "2", "rejected": "3"}\n', encoding="utf-8")
    with pytest.raises(FileError, match="must not be mixed"):
        finetune(folder, mixed, tmp_path / "run")
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": 3}\n', encoding="utf-8")
    with pytest.raises(FileError, match="a row must be"):
        finetune(folder, tmp_path / "wrong.jsonl", tmp_path / "run")
    for row in ('{"text": "1", "prompt": "2"}', '{"prompt": "1", "completion": "2", "chosen": "2", "rejected": "3"}'):
        (tmp_path / "both.jsonl").write_text(row + "\n", encoding="utf-8")
        with pytest.raises(FileError, match="a row must have the keys of one form, got"):
            finetune(folder, tmp_path / "both.jsonl", tmp_path / "run")
    with pytest.raises(ValueError, match="beta must be above 0 and finite"):
        TuningSettings(beta=0.0).check()


def test_settings_are_checked(folder, data, tmp_path):
    with pytest.raises(ValueError, match=r"\[finetune\] optimizer must be one of adamw, adamw8bit"):
        TuningSettings(optimizer="sgd").check()
    for wrong in ({"method": "sft"}, {"rank": 0}, {"held_out": 1.0}, {"precision": "int8"}):
        with pytest.raises(ValueError, match=rf"\[finetune\] {next(iter(wrong))} must be"):
            finetune(folder, data, tmp_path, TuningSettings(**wrong))
    for wrong in ({"alpha": 0.0}, {"alpha": np.nan}, {"lr": np.nan}, {"lr": -1.0}, {"grad_clip": -1.0}, {"length": -5}, {"seed": -1}):
        with pytest.raises(ValueError, match=rf"\[finetune\] {next(iter(wrong))} must be (above 0|at least [02])"):
            TuningSettings(**wrong).check()
    with pytest.raises(DtypeError, match=r"\[finetune\] kind must be one of F32"):  # before the training
        finetune(folder, data, tmp_path / "kind", merged="Q9")
    assert not (tmp_path / "kind").exists()
    with pytest.raises(ValueError, match="held_out must leave at least one row to train on"):
        finetune(folder, data, tmp_path, TuningSettings(held_out=0.99))
