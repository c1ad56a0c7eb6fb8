"""Recipes: the data, the model and the training settings of a run, as plain values for a file or a command line."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import math
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.errors import did_you_mean, message
from netcl.data import DataLoader, augment, datasets, files
from netcl.distributed import ShardedLoader, World
from netcl.nn.factory import registered
from netcl.nn.parameter import placed
from netcl.trainer.callbacks import Callback
from netcl.trainer.metrics import MAE, Metric
from netcl.trainer.pictures import read_folder
from netcl.trainer.trainer import Trainer, token_cross_entropy
from netcl.vision.models import get_model, list_models


class RecipeError(ValueError):
    """Raised for an invalid recipe."""


_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "a table of options"}
POSITIVE = math.ulp(0.0)
AMP_DTYPES = ("", "float16", "bfloat16")
_FIELD_BOUNDS: dict[str, tuple[float, float]] = {
    "epochs": (1, math.inf), "batch_size": (1, math.inf), "accumulation_steps": (1, math.inf), "log_every": (1, math.inf),
    "workers": (0, math.inf), "patience": (0, math.inf), "val_split": (0, 1), "test_split": (0, 1),
    "seed": (0, math.inf), "lr": (0, math.inf), "weight_decay": (0, math.inf), "grad_clip": (0, math.inf),
    "warmup": (0, 1), "ema": (0, 1),
}  # fmt: skip


def doc_field(default: Any, doc: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"doc": doc})


def check_bounds(op: str, settings: Any, bounds: Mapping[str, tuple[float, float]], error: type[Exception] = ValueError) -> None:
    """Raise unless each setting is at least the first of its bounds and below the second; :data:`POSITIVE` as the first means above 0."""
    for name, (least, below) in bounds.items():
        value = getattr(settings, name)
        if not least <= value < below:
            begin = "above 0" if least == POSITIVE else f"at least {least}"
            end = f" and below {below}" if below < math.inf else " and finite" if isinstance(value, float) else ""
            raise error(message(op, f"{name} must be {begin}{end}", **{name: value}))


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. Fields are the keys of a TOML or JSON file and, spelled with dashes, the options of ``netcl train``."""

    data: str = doc_field(
        "digits",
        "folder:PATH (of pictures), csv:FILE, npz:FILE, idx:FOLDER, text:FILE; or digits, mnist, fashion-mnist, cifar10, synthetic, text",
    )
    root: str = doc_field("", "folder of the data's files; for text, the file itself")
    target: str = doc_field("", "the column of a CSV file to predict")
    task: str = doc_field("", "classification or regression; inferred from the targets if empty")
    val_split: float = doc_field(0.1, "share of the training samples, drawn by the seed, by which the best weights are chosen; 0 for none")
    test_split: float = doc_field(0.1, "share of your own data, drawn by the seed, that is used only for the final numbers")
    data_options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "options of the data"})
    model: str = doc_field("auto", "cnn, mlp, lenet, vit, gpt (for text), a name of netcl.vision.models, MODULE:CLASS or FILE.py:CLASS")
    model_options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "options of the model"})
    epochs: int = doc_field(10, "passes over the data")
    patience: int = doc_field(0, "epochs without a lower validation loss after which the run ends; 0 for never")
    batch_size: int = doc_field(64, "samples of a batch, over all ranks")
    optimizer: str = doc_field("adamw", "sgd, adam, adamw, rmsprop or lion")
    lr: float = doc_field(2e-3, "the highest learning rate")
    weight_decay: float = doc_field(0.01, "weight decay of the optimizer")
    schedule: str = doc_field("cosine", "schedule of the learning rate: cosine or constant")
    warmup: float = doc_field(0.05, "share of the run in which the learning rate rises, for cosine")
    augment: bool = doc_field(True, "rotate, shift and scale training images at random, by a little")
    grad_clip: float = doc_field(0.0, "the largest norm of all gradients together; 0 for none")
    accumulation_steps: int = doc_field(1, "batches per step of the optimizer")
    ema: float = doc_field(0.0, "decay of the moving average of the weights, near 1; 0 for none")
    mixed_precision: str = doc_field("", "float16 or bfloat16: compute in it where that is safe")
    compile: bool = doc_field(False, "record the training step once and replay it")
    workers: int = doc_field(0, "processes that prepare batches; 0 for none")
    log_every: int = doc_field(10, "batches between two reads of the loss and the metrics")
    seed: int = doc_field(0, "seed of weights, order and augmentation")

    def __post_init__(self) -> None:
        check_bounds("recipe", self, _FIELD_BOUNDS, RecipeError)
        if self.mixed_precision not in AMP_DTYPES:
            what = "mixed_precision must be float16, bfloat16 or empty"
            raise RecipeError(message("recipe", what, mixed_precision=repr(self.mixed_precision)))

    def resolved(self) -> Recipe:
        """Return the recipe with ``auto`` replaced by a model for its data: gpt for text, mlp for tables and arrays, cnn for images."""
        kind = self.data.partition(":")[0].lower()
        return self if self.model != "auto" else self.changed({"model": {"text": "gpt", "csv": "mlp", "npz": "mlp"}.get(kind, "cnn")})

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Return a copy with other values; unknown names and wrong types raise."""
        kinds = {item.name: type(getattr(self, item.name)) for item in dataclasses.fields(self)}
        checked = {}
        for name, value in changes.items():
            key = name.replace("-", "_")
            if key not in kinds:
                raise RecipeError(message("recipe", f"unknown setting {name!r}", did_you_mean(key, kinds, most=1)))
            kind = kinds[key]
            value = float(value) if kind is float and type(value) is int and abs(value) < 1 << 1000 else value
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise RecipeError(message("recipe", f"{name} must be {_KINDS[kind]}", value=repr(value)))
            checked[key] = value
        return dataclasses.replace(self, **checked)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return dataclasses.asdict(self)


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a TOML or JSON file. ``data`` and ``model`` may be tables with ``name`` and further options."""
    file = Path(path)
    try:
        if file.suffix != ".json" and importlib.util.find_spec("tomllib") is None:  # Python 3.10
            raise ValueError("this Python cannot read TOML; write the recipe as JSON, or use Python 3.11")
        reader = json if file.suffix == ".json" else importlib.import_module("tomllib")
        content = reader.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:  # a text that is no UTF-8 is a ValueError too
        raise RecipeError(message("recipe", f"the file cannot be read: {fault}", file=file)) from fault
    if not isinstance(content, dict):
        raise RecipeError(message("recipe", "a recipe must be a table of settings", given=type(content).__name__, file=file))
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
    """The datasets of a run. ``reading`` describes, in JSON types, how inputs are read from files and how outputs are decoded."""

    train: Any
    test: Any
    classes: tuple[str, ...]  # empty for text and for a regression
    val: Any = None
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(np.shape(self.train[0][0]))

    @property
    def outputs(self) -> int:
        """The number of outputs of a model per input, or per position of a text."""
        return self.train.vocabulary if self.is_text else len(self.classes) or len(self.reading["scale"])

    @property
    def is_text(self) -> bool:
        return self.reading.get("kind") == "text"

    @property
    def is_regression(self) -> bool:
        return "scale" in self.reading

    @property
    def metrics(self) -> list[str | Metric]:
        """The metrics to compute besides the loss."""
        return [MAE(self.reading["scale"]), "r2"] if self.is_regression else ["accuracy"]

    @property
    def loss_fn(self) -> Any:
        return token_cross_entropy if self.is_text else ag.mse_loss if self.is_regression else None


FILES: dict[str, Callable[..., files.Samples]] = {"folder": read_folder, **files.READERS}


def load_data(recipe: Recipe) -> Data:
    """Load the data of a recipe: training, test and perhaps validation part. Validation samples are never taken from the test part."""
    kind, colon, place = recipe.data.partition(":")
    key = kind.lower().replace("_", "-")
    known = (*datasets.DATASET_NAMES, *(f"{name}:PATH" for name in (*FILES, "text")))
    if key not in (*FILES, "text") if colon else key not in datasets.DATASET_NAMES:
        raise RecipeError(message("recipe", "unknown data", f"known are {', '.join(known)}", data=repr(recipe.data)))
    used = {"target": key == "csv", "task": key in files.READERS, "root": not colon}
    for name in (name for name, is_used in used.items() if getattr(recipe, name) and not is_used):
        raise RecipeError(message("recipe", f"{name} is not a setting of this data", "leave it out", data=repr(recipe.data)))
    root = place if key == "text" and colon else recipe.root
    if key == "text" and not root:
        raise RecipeError(message("recipe", "data 'text' requires a file", "pass --data text:FILE", data=repr(recipe.data)))
    try:
        found = _own_data(recipe) if colon and key != "text" else _named_data(recipe, key, root)
        if len(found.classes) == 1:  # every model would be right
            raise ValueError(message("data", "a classification must have at least 2 classes", classes=list(found.classes)))
        return found
    except RecipeError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, MemoryError) as fault:
        raise RecipeError(message("recipe", f"the data cannot be read: {fault}", data=recipe.data, options=recipe.data_options)) from fault


def _own_data(recipe: Recipe) -> Data:
    plan = files.SplitPlan(recipe.target, recipe.task, recipe.val_split, recipe.test_split, recipe.seed)
    kind, _, place = recipe.data.partition(":")
    path = Path(place).expanduser()
    if not path.exists():
        raise FileNotFoundError(message(kind, "the file or folder must exist", "paths are relative to the current folder", path=path))
    found = FILES[kind](path, plan, **recipe.data_options)
    return Data(found.train, found.test, found.classes, found.val, found.reading)


def _named_data(recipe: Recipe, key: str, root: str) -> Data:
    options = dict(recipe.data_options)
    if key == "text":
        block = options.pop("block", recipe.model_options.get("block_size", 64))
        if type(block) is not int or block < 1:
            raise RecipeError(message("recipe", "block (block_size of the model) must be a whole number of at least 1", block=repr(block)))
        options = {"block": block, "step": max(1, block // 4), "test": recipe.test_split, **options}
    train, test = datasets.DATASET_NAMES[key](*((root,) if root else ()), **options)
    if not len(train) or not len(test):
        raise RecipeError(message("recipe", "data must have samples to train and to test with", train=len(train), test=len(test)))
    if key == "text":
        return Data(*_text_parts(train, test, recipe.val_split), reading={"kind": "text"})
    classes = tuple(getattr(train, "classes", ()) or ())
    kept, val = files.held_out(train, train.arrays[1], recipe.val_split, recipe.seed)
    return Data(kept, test, classes, val, {"kind": "image", "classes": list(classes), "shape": list(train[0][0].shape)})


def _text_parts(train: Any, test: Any, fraction: float) -> tuple[Any, Any, tuple[str, ...], Any]:
    """Return train, test, no class names, and the end of the training text for validation (``None`` for fraction 0 or a short text)."""
    size = max(train.block + 1, int(len(train.content) * fraction))
    cut = len(train.content) - size
    if not fraction or cut < train.block + 1:
        return train, test, (), None
    content = train.content.tobytes()
    end = datasets.Bytes(content[cut:], train.block, train.block, train.name)
    return datasets.Bytes(content[:cut], train.block, train.step, train.name), test, (), end


def make_loaders(recipe: Recipe, data: Data, queue: Any, world: World | None = None) -> tuple[DataLoader, DataLoader | None, DataLoader]:
    """Return the loaders for training, validation (or ``None``) and testing on a queue. Each rank trains on its part of a batch."""
    images = len(data.shape) == 3 and data.reading.get("kind") == "image"
    small_shift = augment.RandomAffine(degrees=8, translate=0.08, scale=(0.92, 1.08)) if images and recipe.augment else None
    common: dict[str, Any] = {"device_queue": queue, "num_workers": recipe.workers, "seed": recipe.seed}
    common |= {"shuffle": True, "drop_last": len(data.train) > recipe.batch_size, "augment": small_shift}
    shared = world is not None and world.size > 1
    check_shares(recipe, 1 if world is None else world.size)
    kind = partial(ShardedLoader, world=world) if shared else DataLoader
    train = kind(data.train, recipe.batch_size, **common)
    val, test = (part and DataLoader(part, recipe.batch_size, shuffle=False, device_queue=queue) for part in (data.val, data.test))
    return train, val, test


def check_shares(recipe: Recipe, ranks: int) -> None:
    """Raise unless a batch divides into equal parts for ``ranks`` ranks."""
    if recipe.batch_size % ranks:
        what = "batch_size must be a multiple of the number of ranks"
        raise RecipeError(message("recipe", what, batch_size=recipe.batch_size, ranks=ranks))


# ---- models


def cnn(data: Data, width: int = 32, dropout: float = 0.1) -> Any:
    """Return a CNN: 2 convolutions with ``width`` channels and 2 with twice as many, pooled after each pair; for 4 x 4 pixels or more."""

    def block(inside: int, out: int) -> list[Any]:
        return [nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    layers = [*block(data.shape[0], width), *block(width, width), nn.MaxPool2d(2), *block(width, 2 * width), *block(2 * width, 2 * width)]
    side = data.shape[-1] // 4
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * side * (data.shape[-2] // 4), data.outputs)]
    return nn.Sequential(*layers, *head)


def vit(data: Data, **options: Any) -> Any:
    side = data.shape[-1]
    small = {"patch_size": 4 if side % 4 == 0 else 1, "num_layers": 4, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return nn.ViT(image_size=side, num_classes=data.outputs, in_channels=data.shape[0], **{**small, **options})


def gpt(data: Data, **options: Any) -> Any:
    small = {"block_size": data.shape[0], "n_layer": 4, "n_head": 4, "n_embd": 128}
    return nn.GPT(data.train.vocabulary, **{**small, **options})


def _vision_model(name: str, data: Data, **options: Any) -> Any:
    own = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {"image_size": data.shape[-1]} if name[:4] == "vit_" else {}
    return get_model(name, **{"num_classes": data.outputs, "in_channels": data.shape[0], **own, **options})


MODELS: dict[str, Callable[..., Any]] = {
    "cnn": cnn,
    "mlp": lambda data, hidden=(256, 128), **options: nn.MLP(math.prod(data.shape), list(hidden), data.outputs, **options),
    "lenet": lambda data, **options: nn.LeNet(data.outputs, data.shape[0], data.shape[-1], **options),
    "resnet18": lambda data, **options: nn.ResNet18(data.outputs, in_channels=data.shape[0], **options),
    **{name: partial(_vision_model, name) for name in list_models(exclude=("fcn_*", "deeplabv3_*", "lraspp_*", "ssd*", "resnet18"))},
    "vit": vit,
    "gpt": gpt,
}


def own_model(spec: str) -> Callable[..., Any]:
    """Import the class or function ``MODULE:NAME`` or ``FILE.py:NAME``; a class is registered, so that its models can be saved."""
    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            found: Any = SimpleNamespace(**runpy.run_path(place, run_name=Path(place).stem))
        else:
            sys.path[:0] = [] if "" in sys.path or os.getcwd() in sys.path else [os.getcwd()]
            found = importlib.import_module(place)
        made = getattr(found, name)
    except (ImportError, OSError, AttributeError) as fault:
        remedy = "pass --model MODULE:CLASS, importable from the current folder, or FILE.py:CLASS"
        raise RecipeError(message("recipe", f"the model cannot be found: {fault}", remedy, model=spec)) from fault
    if isinstance(made, type) and issubclass(made, nn.Module) and made.__name__ not in registered():
        nn.register_layer(made)
    return made


def _model_options(made: Callable[..., Any], data: Data, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options``, plus the parameters of ``made`` that follow from ``data`` (``num_classes``, ``in_channels``, ...)."""
    known: dict[str, Any] = {"num_classes": data.outputs, "out_features": data.outputs, "in_channels": data.shape[0]}
    known |= {"in_features": math.prod(data.shape), "input_shape": data.shape}
    return {**{name: value for name, value in known.items() if name in inspect.signature(made).parameters}, **options}


def make_model(recipe: Recipe, data: Data, device: Any) -> Any:
    """Make the model of a recipe for its data, on a device."""
    recipe = recipe.resolved()
    if ":" in recipe.model:
        made = own_model(recipe.model)
        make = lambda data, **options: made(**_model_options(made, data, options))  # noqa: E731
    elif recipe.model not in MODELS:
        known = "known are cnn, mlp, lenet, vit, gpt, the names of netcl.vision.models, and MODULE:CLASS of your own"
        near = did_you_mean(recipe.model, MODELS, most=2)
        raise RecipeError(message("recipe", "unknown model", f"{near} {known}".strip(), model=repr(recipe.model)))
    elif data.is_text != (recipe.model == "gpt"):
        what = "the model must be gpt for text, and another one for other data"
        raise RecipeError(message("recipe", what, data=recipe.data, model=recipe.model))
    else:
        make = MODELS[recipe.model]
    try:
        with placed(device):
            return make(data, **recipe.model_options)
    except (TypeError, ValueError, LookupError, ArithmeticError) as fault:
        options = {"model": recipe.model, "options": recipe.model_options}
        raise RecipeError(message("recipe", f"the model cannot be made: {fault}", **options)) from fault


# ---- training

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params, lr, weight_decay: optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay),
    "adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSProp, "lion": optim.Lion,
}  # fmt: skip
SCHEDULES = ("cosine", "constant")


def make_trainer(recipe: Recipe, model: Any, steps_per_epoch: int, data: Data, callbacks: list[Callback]) -> Trainer:
    """Make the trainer of a recipe, with its optimizer, schedule, loss and metrics."""
    if recipe.optimizer not in OPTIMIZERS or recipe.schedule not in SCHEDULES:
        known = f"optimizers are {', '.join(OPTIMIZERS)}, schedules {', '.join(SCHEDULES)}"
        raise RecipeError(message("recipe", "unknown optimizer or schedule", known, optimizer=recipe.optimizer, schedule=recipe.schedule))
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    total = max(1, recipe.epochs * (-(-steps_per_epoch // recipe.accumulation_steps)))
    scheduler = None
    if recipe.schedule == "cosine":
        scheduler = optim.WarmupCosine(optimizer, min(int(recipe.warmup * total), total - 1), total)
    return Trainer(
        model, optimizer, loss_fn=data.loss_fn, metrics=data.metrics,
        mixed_precision=recipe.mixed_precision or False, grad_clip=recipe.grad_clip or None,
        accumulation_steps=recipe.accumulation_steps, scheduler=scheduler, compile=recipe.compile,
        ema=optim.ModelEMA(model, recipe.ema, warmup=True) if recipe.ema else None, callbacks=callbacks,
    )  # fmt: skip
