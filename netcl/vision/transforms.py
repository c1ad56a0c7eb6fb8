"""Transforms of ``torchvision.transforms`` and ``torchvision.transforms.v2``, for PIL images and tensors.

Called with several values, ``transform(image, label)``, a transform changes the first and returns all. In a loader, random numbers are
drawn per batch and do not depend on the number of workers. Elsewhere they follow :func:`netcl.manual_seed`.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from netcl.core import recording
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.data.fetch import batch_rng
from netcl.nn.module import Module
from netcl.ops import random
from netcl.replay.kinds import report_layer
from netcl.vision import functional
from netcl.vision.functional import InterpolationMode, as_pair

v2 = sys.modules[__name__]  # the names of both versions are here
_random_state: dict[str, Any] = {"seeded": None, "rng": None}


def rng() -> Any:
    """Return the generator of transforms: in a loader the batch's generator, else a generator that ``netcl.manual_seed`` seeds."""
    recording.host_work("random numbers of a transform")
    own = batch_rng()
    if own is not None:
        return own
    if _random_state["seeded"] is not random.seeded():
        _random_state.update(seeded=random.seeded(), rng=np.random.default_rng(random.seeded()[0]))
    return _random_state["rng"]


class Transform(Module):
    """Base class of transforms: a module without parameters whose ``forward`` takes an image, unconverted and without hooks."""

    def forward(self, image: Any) -> Any:
        """Return the transformed image."""
        raise NotImplementedError(message(type(self).__name__, "a transform must define forward"))

    def __call__(self, image: Any, *others: Any) -> Any:
        report_layer(self)
        if any(map(F.is_pil, others)):
            what, remedy = "only the first value is transformed, but a later one is an image", "transform the images one by one"
            raise TypeError(message(type(self).__name__, what, remedy, given=[type(other).__name__ for other in (image, *others)]))
        made = self.forward(image)
        return (made, *others) if others else made

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._settings().items())

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name != "training"}


def _class_of(name: str, function: Callable[..., Any], probability: float | None = None, **renamed: str) -> Any:
    """Return a transform class that calls ``function``. ``renamed`` maps its parameters to new names; ``p`` defaults to ``probability``."""
    known = list(inspect.signature(function).parameters.values())[1:]
    taken = [p.replace(name=renamed.get(p.name, p.name), kind=p.POSITIONAL_OR_KEYWORD) for p in known]
    if probability is not None:
        taken.append(inspect.Parameter("p", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=probability))
    signature = inspect.Signature(taken)

    def init(self: Any, *values: Any, **options: Any) -> None:
        given = signature.bind(*values, **options)
        given.apply_defaults()
        vars(self).update(given.arguments)

    def forward(self: Any, image: Any) -> Any:
        if probability is not None and rng().random() >= self.p:
            return image
        return function(image, **{p.name: getattr(self, renamed.get(p.name, p.name)) for p in known})

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    init.__signature__ = signature.replace(parameters=[own, *taken])  # type: ignore[attr-defined]
    doc = f"{inspect.getdoc(function)}{'' if probability is None else ' Applied with probability ``p``.'}"
    return type(Module)(name, (Transform,), {"__init__": init, "forward": forward, "__doc__": doc, "__module__": __name__})  # type: ignore[misc]


F = functional
ToTensor, PILToTensor = _class_of("ToTensor", F.to_tensor), _class_of("PILToTensor", F.pil_to_tensor)
ToImage = _class_of("ToImage", F.to_image)
ToPILImage, ConvertImageDtype = _class_of("ToPILImage", F.to_pil_image), _class_of("ConvertImageDtype", F.convert_image_dtype)
ToDtype, Normalize = _class_of("ToDtype", F.to_dtype), _class_of("Normalize", F.normalize)
Resize, Pad = _class_of("Resize", F.resize), _class_of("Pad", F.pad)
CenterCrop = _class_of("CenterCrop", F.center_crop, output_size="size")
Grayscale = _class_of("Grayscale", F.rgb_to_grayscale)
RandomHorizontalFlip, RandomVerticalFlip = _class_of("RandomHorizontalFlip", F.hflip, 0.5), _class_of("RandomVerticalFlip", F.vflip, 0.5)
RandomInvert = _class_of("RandomInvert", F.invert, 0.5)


def _grayed(image: Any) -> Any:
    """Convert to grayscale; the number of channels is unchanged."""
    return F.rgb_to_grayscale(image, F.get_image_num_channels(image))


RandomGrayscale = _class_of("RandomGrayscale", _grayed, 0.1)


class Compose(Transform):
    """Applies transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[..., Any]]):
        self.transforms = transforms

    def forward(self, image: Any) -> Any:
        return reduce(lambda made, transform: transform(made), self.transforms, image)


class RandomApply(Compose):
    """Applies all transforms with probability ``p``, or none."""

    def __init__(self, transforms: Sequence[Callable[..., Any]], p: float = 0.5):
        super().__init__(transforms)
        self.p = p

    def forward(self, image: Any) -> Any:
        return super().forward(image) if rng().random() < self.p else image


class RandomOrder(Compose):
    """Applies all transforms in random order."""

    def forward(self, image: Any) -> Any:
        return reduce(lambda made, i: self.transforms[i](made), rng().permutation(len(self.transforms)), image)


class RandomChoice(Compose):
    """Applies one of the transforms, chosen with the probabilities ``p``."""

    def __init__(self, transforms: Sequence[Callable[..., Any]], p: Sequence[float] | None = None):
        super().__init__(transforms)
        self.p = p

    def forward(self, image: Any) -> Any:
        shares = None if self.p is None else np.asarray(self.p) / np.sum(self.p)
        return self.transforms[rng().choice(len(self.transforms), p=shares)](image)


class Lambda(Transform):
    """Applies a function to the image."""

    def __init__(self, lambd: Callable[[Any], Any]):
        if not callable(lambd):
            raise TypeError(message("Lambda", "lambd must be a function", given=type(lambd).__name__))
        self.lambd = lambd

    def forward(self, image: Any) -> Any:
        return self.lambd(image)


class Identity(Transform):
    """Returns the image unchanged."""

    def forward(self, image: Any) -> Any:
        return image


class ToPureTensor(Identity):
    """Returns the image unchanged: netcl has no tensor subclasses to convert."""


class RandomCrop(Transform):
    """Crops a window of ``size`` at a random position, after ``padding``; ``pad_if_needed`` also pads images that are too small."""

    def __init__(self, size: Any, padding: Any = None, pad_if_needed: bool = False, fill: Any = 0, padding_mode: str = "constant"):
        self.size, self.padding, self.pad_if_needed = as_pair(size), padding, pad_if_needed
        self.fill, self.padding_mode = fill, padding_mode

    @staticmethod
    def get_params(img: Any, output_size: Sequence[int]) -> tuple[int, int, int, int]:
        """Return the top, left, height and width of a random window; raises if the image is smaller than ``output_size``."""
        (_, rows, columns), (height, width) = F.get_dimensions(img), output_size
        if rows < height or columns < width:
            what, remedy = "the window must fit into the padded image", "pass padding=, or pad_if_needed=True"
            raise ValueError(message("RandomCrop", what, remedy, image=(rows, columns), size=tuple(output_size)))
        return int(rng().integers(rows - height + 1)), int(rng().integers(columns - width + 1)), height, width

    def forward(self, image: Any) -> Any:
        if self.padding is not None:
            image = F.pad(image, self.padding, self.fill, self.padding_mode)
        (_, rows, columns), (height, width) = F.get_dimensions(image), self.size
        for missing, at in ((width - columns, 0), (height - rows, 1)):
            if self.pad_if_needed and missing > 0:
                image = F.pad(image, [missing, 0] if at == 0 else [0, missing], self.fill, self.padding_mode)
        return F.crop(image, *self.get_params(image, self.size))


class RandomResizedCrop(Transform):
    """Crops a window of random area (``scale``, a fraction) and aspect ratio (``ratio``, width / height) and resizes it to ``size``."""

    def __init__(
        self, size: Any, scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = InterpolationMode.BILINEAR, antialias: bool | None = True,
    ):  # fmt: skip
        self.size, self.scale, self.ratio, self.interpolation, self.antialias = as_pair(size), scale, ratio, interpolation, antialias

    @staticmethod
    def get_params(img: Any, scale: Sequence[float], ratio: Sequence[float]) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a random window; a centered window if none of ten draws fits."""
        _, rows, columns = F.get_dimensions(img)
        for _ in range(10):
            area, shape = rows * columns * rng().uniform(*scale), math.exp(rng().uniform(*map(math.log, ratio)))
            width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < width <= columns and 0 < height <= rows:
                return int(rng().integers(rows - height + 1)), int(rng().integers(columns - width + 1)), height, width
        shape = min(max(columns / rows, min(ratio)), max(ratio))
        height, width = (round(columns / shape), columns) if columns / rows < shape else (rows, round(rows * shape))
        height, width = min(height, rows), min(width, columns)
        return (rows - height) // 2, (columns - width) // 2, height, width

    def forward(self, image: Any) -> Any:
        window = self.get_params(image, self.scale, self.ratio)
        return F.resized_crop(image, *window, self.size, self.interpolation, self.antialias)


def _range(op: str, name: str, value: Any, center: float = 1.0, low: float = 0.0, high: float = math.inf) -> tuple[float, float] | None:
    """Return ``value`` as a range, ``(center - v, center + v)`` for a number ``v``; ``None`` for a range that changes nothing."""
    single = isinstance(value, int | float)
    ends = (max(center - value, low), center + value) if single else tuple(value)
    if (single and value < 0) or len(ends) != 2 or not low <= ends[0] <= ends[1] <= high:
        what = f"{name} must be a number from 0 to {high - center:g}, or a range (low, high) between {low:g} and {high:g}"
        raise ValueError(message(op, what, **{name: value}))
    return None if ends == (center, center) else ends


class ColorJitter(Transform):
    """Changes brightness, contrast, saturation and hue by random amounts, in random order."""

    def __init__(self, brightness: Any = 0, contrast: Any = 0, saturation: Any = 0, hue: Any = 0):
        given = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        for name, value in given.items():
            setattr(self, name, _range("ColorJitter", name, value))
        self.hue = _range("ColorJitter", "hue", hue, 0.0, -0.5, 0.5)

    def forward(self, image: Any) -> Any:
        changes = [partial(getattr(F, f"adjust_{name}"), **{f"{name}_factor": float(rng().uniform(*ends))})
                   for name, ends in self._settings().items() if ends is not None]  # fmt: skip
        return reduce(lambda made, i: changes[i](made), rng().permutation(len(changes)), image)


class RandomRotation(Transform):
    """Rotates by a random angle from the range ``degrees``, or from ``(-degrees, degrees)``."""

    def __init__(
        self, degrees: Any, interpolation: Any = InterpolationMode.NEAREST, expand: bool = False, center: Any = None, fill: Any = 0
    ):
        self.degrees = _range("RandomRotation", "degrees", degrees, 0.0, -math.inf) or (0.0, 0.0)
        self.interpolation, self.expand, self.center, self.fill = interpolation, expand, center, fill

    def forward(self, image: Any) -> Any:
        return F.rotate(image, float(rng().uniform(*self.degrees)), self.interpolation, self.expand, self.center, self.fill)


class RandomAffine(Transform):
    """Rotates, translates by at most ``translate`` (fractions of width and height), scales and shears by random amounts."""

    def __init__(
        self, degrees: Any, translate: Any = None, scale: Any = None, shear: Any = None, interpolation: Any = InterpolationMode.NEAREST,
        fill: Any = 0, center: Any = None,
    ):  # fmt: skip
        self.degrees = _range("RandomAffine", "degrees", degrees, 0.0, -math.inf) or (0.0, 0.0)
        self.shear = (-shear, shear) if isinstance(shear, int | float) else shear
        self.translate, self.scale, self.interpolation, self.fill, self.center = translate, scale, interpolation, fill, center

    def forward(self, image: Any) -> Any:
        _, height, width = F.get_dimensions(image)
        most = zip(self.translate or (0, 0), (width, height), strict=True)
        moves = [round(float(rng().uniform(-share, share)) * size) for share, size in most]
        scale = 1.0 if self.scale is None else float(rng().uniform(*self.scale))
        slants = [float(rng().uniform(*ends)) for ends in np.reshape(self.shear, (-1, 2))] if self.shear is not None else []
        shear = [*slants, 0.0, 0.0][:2]
        return F.affine(image, float(rng().uniform(*self.degrees)), moves, scale, shear, self.interpolation, self.fill, self.center)


class RandomErasing(Transform):
    """Sets a random rectangle of a tensor to ``value`` with probability ``p``; "random" fills it with normal noise."""

    def __init__(self, p: float = 0.5, scale: Any = (0.02, 0.33), ratio: Any = (0.3, 3.3), value: Any = 0, inplace: bool = False):
        self.p, self.scale, self.ratio, self.value, self.inplace = p, scale, ratio, value, inplace

    def forward(self, image: Tensor) -> Tensor:
        if rng().random() >= self.p:
            return image
        channels, rows, columns = F.get_dimensions(image)
        for _ in range(10):
            area, shape = rows * columns * rng().uniform(*self.scale), math.exp(rng().uniform(*map(math.log, self.ratio)))
            height, width = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if height < rows and width < columns:
                noise = rng().standard_normal((channels, height, width), np.float32) if self.value == "random" else None
                value = np.asarray(self.value, np.float32).reshape(-1, 1, 1) if noise is None else noise
                top, left = int(rng().integers(rows - height + 1)), int(rng().integers(columns - width + 1))
                return F.erase(image, top, left, height, width, value, self.inplace)
        return image


class GaussianBlur(Transform):
    """Blurs with a Gaussian kernel whose ``sigma`` is drawn from a range."""

    def __init__(self, kernel_size: Any, sigma: Any = (0.1, 2.0)):
        self.kernel_size, self.sigma = as_pair(kernel_size), (sigma, sigma) if isinstance(sigma, int | float) else tuple(sigma)

    def forward(self, image: Any) -> Any:
        return F.gaussian_blur(image, self.kernel_size, float(rng().uniform(*self.sigma)))


class ImageClassification(Transform):
    """Torchvision's preprocessing: resize and crop the center (unless the size is ``None``), convert to a normalized tensor."""

    def __init__(
        self, *, crop_size: int | None, resize_size: int | None = 256, mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225), interpolation: Any = InterpolationMode.BILINEAR, antialias: bool | None = True,
    ):  # fmt: skip
        self.crop_size, self.resize_size, self.mean, self.std = crop_size, resize_size, mean, std
        self.interpolation, self.antialias = interpolation, antialias

    def forward(self, image: Any) -> Tensor:
        if self.resize_size is not None:
            image = F.resize(image, [self.resize_size], interpolation=self.interpolation, antialias=self.antialias)
        image = image if self.crop_size is None else F.center_crop(image, [self.crop_size])
        image = image if isinstance(image, Tensor) else F.pil_to_tensor(image)
        return F.normalize(F.convert_image_dtype(image, "float32"), self.mean, self.std)
