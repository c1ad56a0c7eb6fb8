"""Fine-tuning of language models: adapters or all weights, on conversations, prompts with completions, or plain text."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import amp, models, ops, optim
from netcl.core.device import device, handle_of
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.data import DataLoader, TensorDataset
from netcl.distributed import World
from netcl.io.archive import refusal
from netcl.models import tuning_data
from netcl.models.folder import read_object, write_json
from netcl.nn.module import Module
from netcl.nn.quantized import quantize_model
from netcl.ops.quantized.formats import kind_of
from netcl.ops.random import manual_seed
from netcl.trainer.callbacks import Callback, LRMonitor, ModelCheckpoint, NaNGuard
from netcl.trainer.metrics import Metric
from netcl.trainer.recipe import POSITIVE, check_bounds, doc_field
from netcl.trainer.report import Report
from netcl.trainer.run import restore_best
from netcl.trainer.trainer import Trainer

TUNING_METHODS = ("lora", "dora", "qlora", "full")
_SETTING_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("rank", "epochs", "batch_size", "accumulate"), (1, math.inf)), "length": (2, math.inf),
    **dict.fromkeys(("dropout", "warmup", "held_out"), (0, 1)), **dict.fromkeys(("alpha", "beta"), (POSITIVE, math.inf)),
    **dict.fromkeys(("seed", "save_every", "lr", "weight_decay", "grad_clip"), (0, math.inf)),
}  # fmt: skip
TUNING_OPTIMIZERS = {"adamw": optim.AdamW, "adamw8bit": optim.AdamW8bit}


@dataclasses.dataclass(frozen=True)
class TuningSettings:
    """The settings of a fine-tuning run; ``seed`` fixes its random numbers."""

    method: str = doc_field("lora", "lora, dora, qlora (adapters on weights packed to 4 bits) or full (all weights)")
    rank: int = doc_field(8, "rank of the adapters")
    alpha: float = doc_field(16.0, "adapters are scaled by alpha / rank")
    dropout: float = doc_field(0.0, "share of the adapters' inputs that is zero in training")
    targets: str = doc_field("", "layers with adapters, separated by commas; all linear layers if empty")
    epochs: int = doc_field(3, "passes over the data")
    batch_size: int = doc_field(1, "blocks per batch")
    accumulate: int = doc_field(8, "batches per step of the optimizer")
    length: int = doc_field(512, "tokens per block, at most the model's context")
    lr: float = doc_field(2e-4, "the highest learning rate")
    warmup: float = doc_field(0.03, "share of the steps in which the learning rate rises; a cosine follows")
    optimizer: str = doc_field("adamw", "adamw, or adamw8bit: its state takes a quarter of the memory")
    weight_decay: float = doc_field(0.0, "weight decay of AdamW, for matrices")
    grad_clip: float = doc_field(1.0, "largest norm of all gradients together; 0 for none")
    held_out: float = doc_field(0.05, "share of the rows that perplexity is evaluated on; 0 for none")
    checkpointing: bool = doc_field(False, "recompute activations for the gradient instead of keeping them")
    beta: float = doc_field(0.1, "for rows with a chosen and a rejected answer (DPO): how closely the model stays to the untrained one")
    precision: str = doc_field("float32", "float32, or mixed with float16 or bfloat16")
    save_every: int = doc_field(0, "steps between checkpoints, besides the one of every epoch; 0 for none")
    seed: int = doc_field(0, "seed of adapters, held-out rows, order and dropout")

    def check(self) -> TuningSettings:
        """Return the settings; raise ``ValueError`` if one of them is invalid."""
        choices = {"method": TUNING_METHODS, "precision": ("float32", "float16", "bfloat16"), "optimizer": tuple(TUNING_OPTIMIZERS)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(message("finetune", f"{name} must be one of {', '.join(known)}", **{name: getattr(self, name)}))
        check_bounds("finetune", self, _SETTING_BOUNDS)
        return self


class TokenLosses(Module):
    """A model that returns the loss of every token, or 0 if its target is ignored. The state dict holds only trainable parameters."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def state_dict(self, destination: dict[str, Tensor] | None = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        found = super().state_dict(destination, prefix, keep_vars=True)
        for name in [name for name, tensor in found.items() if not tensor.requires_grad]:
            del found[name]
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name, tensor in super().state_dict(None, prefix, keep_vars=True).items():
            if not tensor.requires_grad:
                state_dict.setdefault(name, tensor)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, batch: Tensor) -> Tensor:
        ids, documents, positions, targets = (ag.select(batch, 1, i) for i in range(4))
        logits = ag.cast(self.model(ids, positions=positions, documents=documents), "float32")
        flat = ag.reshape(logits, (-1, logits.shape[-1])), ag.reshape(targets, (-1,))
        return ag.reshape(ag.cross_entropy(*flat, ignore_index=tuning_data.IGNORED_TARGET, reduction="none"), ids.shape)


def _learned_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored, as a float; a pair of answers has two."""
    return ag.cast(ag.sum(ag.ne(targets, tuning_data.IGNORED_TARGET)), "float32")


def mean_of_learned(losses: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over the tokens whose target is not ignored."""
    return ag.div(ag.sum(losses), _learned_targets(targets))


class AnswerLosses(TokenLosses):
    """A model that returns the losses of chosen and rejected answers, each summed over its tokens, with shape ``(pairs, 2)``."""

    def forward(self, batch: Tensor) -> Tensor:
        pairs, two, *rest = batch.shape
        return ag.reshape(ag.sum(super().forward(ag.reshape(batch, (pairs * two, *rest))), axis=1), (pairs, two))


def _preference_margin(losses: Tensor, reference: Tensor) -> Tensor:
    """Return, for each pair, the log-probability that the chosen answer gained in training minus the gain of the rejected answer."""
    gained = ag.sub(reference, losses)
    return ag.sub(ag.select(gained, 1, 0), ag.select(gained, 1, 1))


class PreferenceAccuracy(Metric):
    """The share of pairs whose chosen answer gained more log-probability in training than the rejected one."""

    name = "preference"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        return [ops.sum(ops.cast(ops.gt(_preference_margin(outputs, targets), 0.0), "float32"))]


class Perplexity(Metric):
    """The perplexity: ``exp`` of the mean loss over all tokens whose target is not ignored."""

    name = "perplexity"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        return [ops.sum(outputs), ops.sum(ops.ne(targets, tuning_data.IGNORED_TARGET))]

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        return math.exp(min(float(sums[0]) / float(sums[1]), 700.0))  # the largest that float64 has


def finetune(path: str | os.PathLike[str], data: str | os.PathLike[str], out: str | os.PathLike[str],
             settings: TuningSettings | None = None, *, device_name: Any = "auto", resume: bool = False, overwrite: bool = False,
             merged: str = "", callbacks: Sequence[Callback] = ()) -> dict[str, Any]:  # fmt: skip
    """Fine-tune the model of a folder or GGUF file on a JSONL file, into the folder ``out``; return the numbers of the last epoch.

    Writes the weights of the epoch with the lowest loss on held-out rows (if none, on training rows): ``adapter/`` in PEFT's layout, or
    ``model/`` for all weights. ``resume`` continues the run in ``out``, ``overwrite`` deletes its checkpoints first. ``merged`` also writes
    the model with its adapters merged: ``hf``, ``gguf``, or a GGUF type such as ``Q8_0``.
    """
    chosen, place = (settings or TuningSettings()).check(), Path(out)
    if merged not in ("", "hf", "gguf"):
        kind_of(merged, "finetune")  # raises before the training
    manual_seed(chosen.seed)
    model = models.load(path, device_name, None if chosen.method == "qlora" else "float32")
    if not isinstance(model, models.CausalLM):
        raise ValueError(message("finetune", "the model must be a CausalLM, which generates text", model=type(model).__name__))
    keeper = ModelCheckpoint(place / "checkpoints", every_steps=chosen.save_every or None, overwrite=overwrite)
    with device(handle_of(model.queue)), closing(keeper):
        parts, pairs = _tuning_blocks(model, data, chosen)
        digest = hashlib.sha256(Path(data).read_bytes()).hexdigest()
        _claim(place / "finetune.json", {"model": str(path), "data": digest, **dataclasses.asdict(chosen)}, keeper, resume)
        model.checkpointing = chosen.checkpointing
        if chosen.method == "qlora":
            quantize_model(model, 4, activations="float")
        wrapped: TokenLosses = (AnswerLosses if pairs else TokenLosses)(model)
        train, *val = _loaders(wrapped, parts, chosen, pairs)
        if chosen.method != "full":
            names = [name.strip() for name in chosen.targets.split(",") if name.strip()] or None
            models.lora(model, chosen.rank, chosen.alpha, names, chosen.dropout, chosen.method == "dora")
        learned, make_optimizer = [p for p in wrapped.parameters() if p.requires_grad], TUNING_OPTIMIZERS[chosen.optimizer]
        groups = [
            {"params": [p for p in learned if (p.ndim < 2) is flat], "weight_decay": 0.0 if flat else chosen.weight_decay}
            for flat in (False, True)
        ]  # norms and biases do not decay, as in transformers: Gemma's norms would lose their 1
        optimizer = make_optimizer([group for group in groups if group["params"]], lr=chosen.lr)

        def preference_loss(losses: Tensor, reference: Tensor) -> Tensor:  # DPO: Rafailov et al. 2023
            return ag.mean(ag.softplus(ag.mul(_preference_margin(losses, reference), -chosen.beta)))

        steps, tokens = chosen.epochs * -(-len(train) // chosen.accumulate), float(parts[0][1].shape[-1] * chosen.batch_size)
        trainer = Trainer(
            wrapped, optimizer, loss_fn=preference_loss if pairs else mean_of_learned,
            metrics=[PreferenceAccuracy() if pairs else Perplexity()], grad_clip=chosen.grad_clip or None,
            mixed_precision=False if chosen.precision == "float32" else chosen.precision, accumulation_steps=chosen.accumulate,
            scheduler=optim.WarmupCosine(optimizer, min(round(chosen.warmup * steps), steps - 1), steps),
            callbacks=[LRMonitor(), NaNGuard(), keeper, Report(place, f"{Path(path).name} / {chosen.method}"), *callbacks],
            batch_weight=lambda targets: ag.div(_learned_targets(targets), tokens),
        )  # fmt: skip
        trainer.fit(train, val[0] if val else None, epochs=chosen.epochs, resume="auto" if resume else None)
        best = restore_best(trainer, keeper, World())
        model.checkpointing = False
        _write_result(model.eval(), path, place, chosen.method, merged)
    return {**trainer.history.last, "best": best, "steps": trainer.step}


def _claim(file: Path, now: dict[str, Any], keeper: ModelCheckpoint, resume: bool) -> None:
    """Write the settings of a new run, or raise if the settings of a resumed run have changed."""
    if not (resume and file.is_file()):
        keeper.claim(None)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, now)
    before = read_object(file, "finetune")
    if old := {name: before.get(name) for name in now if before.get(name) != now[name]}:
        what, remedy = "a resumed run must keep its settings", "pass the same settings, or overwrite the run"
        raise refusal("finetune", what, remedy, file=file, before=old, now={name: now[name] for name in old})


Blocks = tuple[np.ndarray, np.ndarray]


def _tuning_blocks(model: Any, data: str | os.PathLike[str], chosen: TuningSettings) -> tuple[list[Blocks], bool]:
    """Return the training blocks and, if any, the held-out blocks as a list, and whether the rows are pairs of answers."""
    rows, length = tuning_data.read_rows(data), min(chosen.length, model.config.context)
    order, held = np.random.default_rng(chosen.seed).permutation(len(rows)), math.ceil(chosen.held_out * len(rows))
    if held == len(rows):
        what, remedy = "held_out must leave at least one row to train on", "add rows, or set held_out to 0"
        raise ValueError(message("finetune", what, remedy, rows=len(rows), held_out=chosen.held_out))
    made, tokenizer, pairs = list[Blocks](), model.tokenizer, tuning_data.is_preference(rows[0])
    tokenizer.end_tokens = tokenizer.end_tokens or tuple(sorted(model.end_tokens()))  # config.json alone may have them
    for part in (order[held:], order[:held]) if held else (order,):
        if pairs:
            made.append(tuning_data.preference_blocks([tuning_data.preference_of(tokenizer, rows[i]) for i in part], length))
        else:
            documents = [document for i in part for document in tuning_data.documents_of(tokenizer, rows[i])]
            made.append(tuning_data.pack_documents(documents, length))
    return made, pairs


def _loaders(wrapped: TokenLosses, parts: Sequence[Blocks], chosen: TuningSettings, pairs: bool) -> list[DataLoader]:
    """Return a loader of blocks and targets per part; for pairs of answers, the targets are the losses of the untrained model."""
    made, queue = list[DataLoader](), wrapped.model.queue
    half = None if chosen.precision == "float32" else chosen.precision
    for inputs, targets in parts:
        blocks, wanted = np.concatenate([inputs, targets[..., None, :]], axis=-2), targets
        if pairs:
            with ag.no_grad(), amp.autocast(half is not None, half or "float16"):
                wanted = np.concatenate([wrapped(Tensor.from_host(queue, block[None])).to_host() for block in blocks])
        made.append(DataLoader(TensorDataset(blocks, wanted), chosen.batch_size, shuffle=not made, seed=chosen.seed, device_queue=queue))
    return made


def _write_result(model: Any, path: str | os.PathLike[str], place: Path, method: str, merged: str) -> None:
    if method == "full":
        models.save(model, place / "model")
    else:
        models.save_adapter(model, place / "adapter", str(path))
        if merged:  # into the weights of the file: packed ones are an approximation of them
            model = models.merge(models.load_adapter(models.load(path, model.queue, "float32"), place / "adapter"))
    if merged == "hf":
        models.save(model, place / "merged")
    elif merged:
        models.save(model, place / "merged.gguf", "gguf", kind=None if merged == "gguf" else merged)
