"""Recipes: a data set, a model and how to train it, as plain data that a file or a command line can hold."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from netcl import nn, optim
from netcl.core.errors import message
from netcl.data import DataLoader, augment, datasets
from netcl.distributed import ShardedLoader, World
from netcl.nn.parameter import placed
from netcl.ops.random import manual_seed
from netcl.trainer.callbacks import Callback
from netcl.trainer.metrics import Metric
from netcl.trainer.trainer import Trainer, token_cross_entropy


class RecipeError(ValueError):
    """A recipe is invalid."""


_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table of options"}
AMP_DTYPES = ("", "float16", "bfloat16")
_FIELD_BOUNDS: dict[str, tuple[int, float]] = {
    "epochs": (1, math.inf), "batch_size": (1, math.inf), "accumulation_steps": (1, math.inf), "log_every": (1, math.inf),
    "workers": (0, math.inf), "seed": (0, math.inf), "lr": (0, math.inf), "weight_decay": (0, math.inf), "grad_clip": (0, math.inf),
    "warmup": (0, 1), "ema": (0, 1),
}  # fmt: skip


def _setting(default: Any, doc: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. Fields are the keys of a TOML or JSON file and, spelt with dashes, the options of ``netcl train``."""

    data: str = _setting("digits", "a name of netcl.data.datasets: digits, mnist, fashion-mnist, cifar10, synthetic, text")
    root: str = _setting("", "where the files of the data are; the file itself, for text")
    data_options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "options of the data"})
    model: str = _setting("cnn", "cnn, mlp, lenet, resnet18, vit, or gpt for text")
    model_options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "options of the model"})
    epochs: int = _setting(10, "how often the data is gone through")
    batch_size: int = _setting(64, "samples of a batch, over all ranks")
    optimizer: str = _setting("adamw", "sgd, adam, adamw, rmsprop or lion")
    lr: float = _setting(2e-3, "the learning rate, at its highest")
    weight_decay: float = _setting(0.01, "how much weights are pulled to 0")
    schedule: str = _setting("cosine", "cosine or constant: what becomes of the learning rate")
    warmup: float = _setting(0.05, "the part of the run in which the learning rate rises, for cosine")
    augment: bool = _setting(True, "turn, shift and scale images a little, other ones each time")
    grad_clip: float = _setting(0.0, "the largest norm of all gradients together; 0 is none")
    accumulation_steps: int = _setting(1, "so many batches make a step")
    ema: float = _setting(0.0, "how slowly averages of the weights follow, near 1; 0 is none")
    mixed_precision: str = _setting("", "float16 or bfloat16: compute in it where that is safe")
    compile: bool = _setting(False, "record the step and replay it")
    workers: int = _setting(0, "processes that prepare batches; 0 is none")
    log_every: int = _setting(10, "batches between two looks at the numbers")
    seed: int = _setting(0, "what weights, order and augmentation are drawn from")

    def __post_init__(self) -> None:
        for name, (least, below) in _FIELD_BOUNDS.items():
            value = getattr(self, name)
            if not least <= value < below:
                end = f" and below {below}" if below < math.inf else " and finite" if isinstance(value, float) else ""
                raise RecipeError(message("recipe", f"{name} is at least {least}{end}", **{name: value}))
        if self.mixed_precision not in AMP_DTYPES:
            raise RecipeError(message("recipe", "mixed_precision is float16 or bfloat16", mixed_precision=repr(self.mixed_precision)))

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with other values; unknown names and wrong types raise."""
        kinds = {item.name: type(getattr(self, item.name)) for item in dataclasses.fields(self)}
        checked = {}
        for name, value in changes.items():
            key = name.replace("-", "_")
            if key not in kinds:
                close = difflib.get_close_matches(key, kinds, 1)
                raise RecipeError(message("recipe", f"there is no setting {name!r}", f"did you mean {close[0]}?" if close else ""))
            kind = kinds[key]
            value = float(value) if kind is float and type(value) is int else value
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise RecipeError(message("recipe", f"{name} is {_KINDS[kind]}", value=repr(value)))
            checked[key] = value
        return dataclasses.replace(self, **checked)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary."""
        return dataclasses.asdict(self)


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a TOML or JSON file. ``data`` and ``model`` may be tables: ``name``, and options of the data or the model."""
    file = Path(path)
    try:
        if file.suffix != ".json" and importlib.util.find_spec("tomllib") is None:  # Python 3.10
            raise ValueError("this Python reads no TOML; write the recipe as JSON, or use Python 3.11")
        reader = json if file.suffix == ".json" else importlib.import_module("tomllib")
        content = reader.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:  # a text that is no UTF-8 is a ValueError too
        raise RecipeError(message("recipe", f"the file cannot be read: {fault}", file=file)) from fault
    if not isinstance(content, dict):
        raise RecipeError(message("recipe", "a recipe is a table of settings", file=file))
    for name in ("data", "model"):
        if isinstance(content.get(name), dict):
            options = dict(content[name])
            content[name] = options.pop("name", getattr(Recipe, name))
            if name == "data" and "root" in options:
                content["root"] = options.pop("root")
            content[f"{name}_options"] = options
    return content


# ---- data


@dataclass(frozen=True)
class Data:
    """A data set as a run needs it."""

    train: Any
    test: Any
    classes: tuple[str, ...]  # empty for text

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(np.shape(self.train[0][0]))

    @property
    def is_text(self) -> bool:
        return not self.classes


def load_data(recipe: Recipe) -> Data:
    """The data of a recipe."""
    options = dict(recipe.data_options)
    key = recipe.data.lower().replace("_", "-")
    if key == "text":
        block = options.pop("block", recipe.model_options.get("block_size", 64))
        if type(block) is not int or block < 1:
            raise RecipeError(message("recipe", "block (block_size of the model) must be a whole number from 1 on", block=repr(block)))
        options = {"block": block, "step": max(1, block // 4), **options}
    if key not in datasets.NAMES:
        raise RecipeError(message("recipe", "there is no such data", f"known are {', '.join(datasets.NAMES)}", data=repr(recipe.data)))
    if key == "text" and not recipe.root:
        raise RecipeError(message("recipe", "a text needs a file", "--root FILE", data=repr(recipe.data)))
    place = (recipe.root,) if recipe.root else ()
    try:
        train, test = datasets.NAMES[key](*place, **options)
    except (TypeError, ValueError, LookupError, ArithmeticError, MemoryError) as fault:
        raise RecipeError(message("recipe", f"the data cannot be read: {fault}", data=recipe.data, options=recipe.data_options)) from fault
    if not len(train) or not len(test):
        raise RecipeError(message("recipe", "data must have samples to train and to test with", train=len(train), test=len(test)))
    return Data(train, test, tuple(getattr(train, "classes", ()) or ()))


def make_loaders(recipe: Recipe, data: Data, queue: Any, world: World | None = None) -> tuple[DataLoader, DataLoader]:
    """A loader to train with and one to test with, delivering to a queue; of a world's training batches each rank gets its part."""
    small_shift = None if data.is_text or not recipe.augment else augment.RandomAffine(degrees=8, translate=0.08, scale=(0.92, 1.08))
    common: dict[str, Any] = {"device_queue": queue, "num_workers": recipe.workers, "seed": recipe.seed}
    common |= {"shuffle": True, "drop_last": len(data.train) > recipe.batch_size, "augment": small_shift}
    shared = world is not None and world.size > 1
    check_shares(recipe, 1 if world is None else world.size)
    kind = partial(ShardedLoader, world=world) if shared else DataLoader
    train = kind(data.train, recipe.batch_size, **common)
    return train, DataLoader(data.test, recipe.batch_size, shuffle=False, device_queue=queue)


def check_shares(recipe: Recipe, ranks: int) -> None:
    """Raise unless a batch divides into equal parts for ``ranks`` ranks."""
    if recipe.batch_size % ranks:
        remedy = "choose a multiple of the ranks"
        raise RecipeError(message("recipe", "a batch must divide into equal parts", remedy, batch_size=recipe.batch_size, ranks=ranks))


# ---- models


def cnn(data: Data, width: int = 32, dropout: float = 0.1) -> Any:
    """Convolutions with batch norm: ``width`` channels, then twice as many behind each of two poolings, for images from 8 x 8 on."""

    def block(inside: int, out: int) -> list[Any]:
        return [nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    layers = [*block(data.shape[0], width), *block(width, width), nn.MaxPool2d(2), *block(width, 2 * width), *block(2 * width, 2 * width)]
    side = data.shape[-1] // 4
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * side * (data.shape[-2] // 4), len(data.classes))]
    return nn.Sequential(*layers, *head)


def vit(data: Data, **options: Any) -> Any:
    side = data.shape[-1]
    small = {"patch_size": 4 if side % 4 == 0 else 1, "num_layers": 4, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return nn.ViT(image_size=side, num_classes=len(data.classes), in_channels=data.shape[0], **{**small, **options})


def gpt(data: Data, **options: Any) -> Any:
    small = {"block_size": data.shape[0], "n_layer": 4, "n_head": 4, "n_embd": 128}
    return nn.GPT(data.train.vocabulary, **{**small, **options})


MODELS: dict[str, Callable[..., Any]] = {
    "cnn": cnn,
    "mlp": lambda data, hidden=(256, 128), **options: nn.MLP(math.prod(data.shape), list(hidden), len(data.classes), **options),
    "lenet": lambda data, **options: nn.LeNet(len(data.classes), data.shape[0], data.shape[-1], **options),
    "resnet18": lambda data, **options: nn.ResNet18(len(data.classes), in_channels=data.shape[0], **options),
    "vit": vit,
    "gpt": gpt,
}


def make_model(recipe: Recipe, data: Data, device: Any) -> Any:
    """The model of a recipe for its data, on a device."""
    if recipe.model not in MODELS:
        raise RecipeError(message("recipe", "there is no such model", f"known are {', '.join(MODELS)}", model=repr(recipe.model)))
    if data.is_text != (recipe.model == "gpt"):
        raise RecipeError(message("recipe", "text needs the model gpt, and images another", data=recipe.data, model=recipe.model))
    try:
        with placed(device):
            return MODELS[recipe.model](data, **recipe.model_options)
    except (TypeError, ValueError, LookupError, ArithmeticError) as fault:
        options = {"model": recipe.model, "options": recipe.model_options}
        raise RecipeError(message("recipe", f"the model cannot be made: {fault}", **options)) from fault


# ---- training

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params, lr, weight_decay: optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay),
    "adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSProp, "lion": optim.Lion,
}  # fmt: skip
SCHEDULES = ("cosine", "constant")


def make_trainer(recipe: Recipe, model: Any, steps_per_epoch: int, metrics: list[str | Metric], callbacks: list[Callback]) -> Trainer:
    """The trainer of a recipe."""
    if recipe.optimizer not in OPTIMIZERS or recipe.schedule not in SCHEDULES:
        known = f"optimizers are {', '.join(OPTIMIZERS)}, schedules {', '.join(SCHEDULES)}"
        raise RecipeError(message("recipe", "no such rule", known, optimizer=recipe.optimizer, schedule=recipe.schedule))
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    total = max(1, recipe.epochs * (-(-steps_per_epoch // recipe.accumulation_steps)))
    scheduler = None
    if recipe.schedule == "cosine":
        scheduler = optim.WarmupCosine(optimizer, min(int(recipe.warmup * total), total - 1), total)
    return Trainer(
        model, optimizer, loss_fn=token_cross_entropy if recipe.model == "gpt" else None, metrics=metrics,
        mixed_precision=recipe.mixed_precision or False, grad_clip=recipe.grad_clip or None,
        accumulation_steps=recipe.accumulation_steps, scheduler=scheduler, compile=recipe.compile,
        ema=optim.ModelEMA(model, recipe.ema, warmup=True) if recipe.ema else None, callbacks=callbacks,
    )  # fmt: skip


def seed_all(recipe: Recipe) -> None:
    """Seed every random stream of a run."""
    manual_seed(recipe.seed)
