"""Functions of ``torchvision.transforms.functional``, for a PIL image or a tensor ``(..., channels, height, width)``.

Most use Pillow for PIL images and NumPy on the host for tensors, and follow torchvision's definitions. Results of tensors are on the
tensor's device; tensors made from other images are on the NumPy backend, and a loader moves whole batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from netcl import ops
from netcl.core.device import require
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.data import augment, filters
from netcl.io.packages import optional_module

_GRAY = (np.float32(0.2989), np.float32(0.587), np.float32(0.114))  # shares of red, green and blue


class InterpolationMode(Enum):
    """Methods to compute values between pixels; ``BOX``, ``HAMMING`` and ``LANCZOS`` are for PIL images only."""

    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC = "nearest", "nearest-exact", "bilinear", "bicubic"
    BOX, HAMMING, LANCZOS = "box", "hamming", "lanczos"


_PILLOW = {"nearest": 0, "nearest-exact": 0, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5, "lanczos": 1}


def pillow(module: str = "Image") -> Any:
    """Return a module of Pillow; raises ``ImportError`` with the remedy if Pillow is not installed."""
    return optional_module(f"PIL.{module}", "netcl.vision", "images that are not tensors require Pillow", "pip install pillow")


def is_pil(image: Any) -> bool:
    """Whether ``image`` is a PIL image."""
    loaded = sys.modules.get("PIL.Image")
    return loaded is not None and isinstance(image, loaded.Image)


def _interpolation_mode(interpolation: Any) -> str:
    if isinstance(interpolation, int):  # Pillow's constants
        interpolation = next((name for name, code in _PILLOW.items() if code == interpolation and name != "nearest-exact"), interpolation)
    return InterpolationMode(interpolation).value


def host_tensor(array: Any) -> Tensor:
    """Return an array as a tensor on the NumPy backend."""
    return Tensor.from_host(require("cpu").queue, np.ascontiguousarray(array))


def _changed(op: str, image: Any, function: Callable[[np.ndarray], Any]) -> Any:
    """Apply a function to the array of a tensor or of a PIL image; returns the same type."""
    if is_pil(image):
        made = to_pil_image(function(_pixel_array(image)).transpose(1, 2, 0), image.mode if image.mode != "P" else None)
        if image.mode == "P":
            made.putpalette(image.getpalette())
        return made
    if not isinstance(image, Tensor) or image.ndim < 2:
        what = "the image must be a PIL image or a tensor (..., channels, height, width)"
        raise TypeError(message(op, what, "convert arrays with ToTensor()", type=type(image).__name__, shape=getattr(image, "shape", ())))
    host = image.to_host()
    made = np.ascontiguousarray(function(host))
    return Tensor.from_host(image.queue, made, image.dtype if made.dtype == host.dtype else None)


def _rounded_pixels(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return values in the dtype of ``like``; for an integer dtype, rounded and clipped to its range."""
    low = np.iinfo(like.dtype).min if like.dtype.kind == "i" else 0
    return values.astype(like.dtype) if like.dtype.kind == "f" else np.clip(np.rint(values), low, _most(like.dtype)).astype(like.dtype)


def _fill_values(x: np.ndarray, fill: Any) -> np.ndarray:
    """Return ``fill``, one number or one per channel, in a shape that broadcasts to ``x``."""
    return np.broadcast_to(np.reshape(fill, (-1, 1, 1)), (x.shape[-3], 1, 1)) if x.ndim > 2 else np.reshape(fill, ())


def _most(dtype: Any) -> float:
    dtype = np.dtype(str(dtype)) if str(dtype) != "bfloat16" else np.dtype("float32")
    return 1 if dtype.kind in "fb" else int(np.iinfo(dtype).max)


def _mixing_dtype(dtype: np.dtype) -> np.dtype:
    """Return the float dtype in which colors of ``dtype`` are mixed."""
    return np.result_type(dtype, np.float32) if dtype.kind == "f" else np.dtype(np.float32)


# ---- conversion


def _pixel_array(image: Any) -> np.ndarray:
    """Return an array (channels, height, width) of a PIL image, or of an array (height, width[, channels])."""
    array = np.array(image, copy=True)
    return np.moveaxis(array if array.ndim == 3 else array[..., None], -1, 0)


def pil_to_tensor(pic: Any) -> Tensor:
    """Convert a PIL image to a tensor (channels, height, width) with the same values."""
    if not is_pil(pic):
        raise TypeError(message("pil_to_tensor", "pic must be a PIL image", given=type(pic).__name__))
    return host_tensor(_pixel_array(pic))


def to_tensor(pic: Any) -> Tensor:
    """Convert a PIL image or an array (height, width, channels) to a tensor (channels, height, width); bytes become float32 in 0..1."""
    if not is_pil(pic) and not (isinstance(pic, np.ndarray) and pic.ndim in (2, 3)):
        what = "pic must be a PIL image or an array of 2 or 3 axes"
        raise TypeError(message("to_tensor", what, given=type(pic).__name__, shape=getattr(pic, "shape", None)))
    array = _pixel_array(pic)
    if array.dtype == bool and is_pil(pic):
        array = array.astype(np.uint8) * 255
    return host_tensor(array.astype(np.float32) / 255 if array.dtype == np.uint8 else array)


def to_image(inpt: Any) -> Tensor:
    """Convert an image to a tensor (channels, height, width) of the same dtype."""
    return inpt if isinstance(inpt, Tensor) else host_tensor(_pixel_array(inpt))


def to_pil_image(pic: Any, mode: str | None = None) -> Any:
    """Convert a tensor (C, H, W) or an array (H, W, C) to a PIL image; floats are taken as 0..1 unless ``mode`` is ``F``."""
    if not isinstance(pic, Tensor | np.ndarray):
        raise TypeError(message("to_pil_image", "pic must be a tensor or an array", given=type(pic).__name__))
    array = np.moveaxis(pic.to_host(), 0, -1) if isinstance(pic, Tensor) and pic.ndim == 3 else np.asarray(pic)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] > 4):
        raise ValueError(message("to_pil_image", "pic must have 2 or 3 axes and at most 4 channels", shape=np.shape(pic)))
    if array.dtype.kind == "f" and mode != "F":
        array = (array * 255).astype(np.uint8)
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    made = pillow().fromarray(np.ascontiguousarray(array))
    return made if mode in (None, made.mode) else made.convert(mode) if mode == "1" else pillow().merge(mode, made.split())


def convert_image_dtype(image: Any, dtype: Any = "float32") -> Tensor:
    """Convert values to another dtype and scale them: bytes from 0 to 255 become floats from 0 to 1."""
    if not isinstance(image, Tensor):
        what = "the image must be a tensor"
        raise TypeError(message("convert_image_dtype", what, "put ToImage() or PILToTensor() before it", given=type(image).__name__))
    source, target = str(image.dtype), str(dtype)
    if source == target:
        return image
    floats = [name.startswith(("float", "bfloat")) for name in (source, target)]
    if floats == [True, False] and target in ("int32", "int64"):
        what = "floats cannot be converted to int32 or int64"
        raise ValueError(message("convert_image_dtype", what, "convert to uint8", dtype=source, to=target))
    if floats == [True, False]:
        return _changed("convert_image_dtype", image, lambda x: (x * np.float32(_most(target) + 1 - 1e-3)).astype(target))
    if floats[1]:
        return image.to(target) if floats[0] else ops.div(image.to(target), _most(source))
    down, up = (int(a + 1) // int(b + 1) for a, b in ((_most(source), _most(target)), (_most(target), _most(source))))
    return _changed("convert_image_dtype", image, lambda x: (x // down).astype(target) if down else x.astype(target) * up)


def to_dtype(inpt: Any, dtype: Any = "float32", scale: bool = False) -> Tensor:
    """Convert a tensor to another dtype; ``scale`` also scales its values to that dtype's range."""
    return convert_image_dtype(inpt, dtype) if scale or not isinstance(inpt, Tensor) else inpt.to(str(dtype))


def normalize(tensor: Any, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> Tensor:
    """Subtract ``mean`` from each channel, and divide by ``std``."""
    if not isinstance(tensor, Tensor) or "float" not in str(tensor.dtype):
        given = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(message("normalize", "the image must be a tensor of floats", "put ToTensor() before Normalize", given=given))
    made = _changed("normalize", tensor, lambda x: augment.Normalize(mean, std)(x).astype(x.dtype))
    return tensor.from_host(made.to_host()) if inplace else made


# ---- sizes


def get_dimensions(img: Any) -> list[int]:
    """Return the size of an image as ``[channels, height, width]``."""
    return [len(img.getbands()), img.height, img.width] if is_pil(img) else [img.shape[-3] if img.ndim > 2 else 1, *img.shape[-2:]]


def get_image_size(img: Any) -> list[int]:
    """Return the size of an image as ``[width, height]``."""
    return get_dimensions(img)[:0:-1]


def get_image_num_channels(img: Any) -> int:
    """Return the number of channels of an image."""
    return get_dimensions(img)[0]


def as_pair(size: Any) -> list[Any]:
    """Expand ``n`` and ``[n]`` to ``[n, n]``.

    >>> as_pair(3)
    [3, 3]
    """
    sizes = [size] if isinstance(size, int | np.integer) else list(size)
    if len(sizes) not in (1, 2):
        raise ValueError(message("vision", "there must be one or two numbers", given=size))
    return sizes * 2 if len(sizes) == 1 else sizes


def resize(
    img: Any, size: Any, interpolation: Any = InterpolationMode.BILINEAR, max_size: int | None = None, antialias: bool | None = True
) -> Any:
    """Resize to ``[height, width]``, or the shorter side to ``size``. ``max_size`` then limits the longer side."""
    _, height, width = get_dimensions(img)
    sizes: list[Any] = [size] if isinstance(size, int | np.integer) else list(size)
    if len(sizes) > 2 or (max_size is not None and (len(sizes) > 1 or max_size <= sizes[0])):
        what = "size must be one number or (height, width); with max_size, one number below max_size"
        raise ValueError(message("resize", what, size=size, max_size=max_size))
    if len(sizes) == 1:
        short, long = sorted((height, width))
        new = [sizes[0], int(sizes[0] * long / short)]
        if max_size is not None and new[1] > max_size:
            new = [int(max_size * new[0] / new[1]), max_size]
        sizes = new if height <= width else new[::-1]
    if sizes == [height, width]:
        return img
    mode = _interpolation_mode(interpolation)
    if is_pil(img):
        return img.resize((sizes[1], sizes[0]), _PILLOW[mode])
    if mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        what = "interpolation of tensors must be nearest, nearest-exact, bilinear or bicubic"
        raise ValueError(message("resize", what, interpolation=mode))

    def resampled(x: np.ndarray) -> np.ndarray:
        wide = x.reshape(1, -1, height, width).astype(np.float32 if x.dtype.itemsize < 4 else np.result_type(x.dtype, np.float32))
        smooth = bool(antialias) and not mode.startswith("nearest")
        made = ops.interpolate(host_tensor(wide), size=tuple(sizes), mode=mode, antialias=smooth).to_host()
        return _rounded_pixels(made, x).reshape(*x.shape[:-2], *sizes)

    return _changed("resize", img, resampled)


def pad(img: Any, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Any:
    """Pad by one width, (x, y) or (left, top, right, bottom), with ``fill``, one number or one per channel; negative widths crop."""
    sizes = [padding] if isinstance(padding, int | np.integer) else list(padding)
    if len(sizes) not in (1, 2, 4):
        raise ValueError(message("pad", "padding must have 1, 2 (left and right, top and bottom) or 4 numbers", padding=padding))
    left, top, right, bottom = map(int, sizes * (4 // len(sizes)))
    if padding_mode not in ("constant", "edge", "reflect", "symmetric"):
        raise ValueError(message("pad", "padding_mode must be constant, edge, reflect or symmetric", padding_mode=padding_mode))
    if is_pil(img) and padding_mode == "constant":
        return pillow("ImageOps").expand(img, (left, top, right, bottom), _color(img, fill))

    def padded(x: np.ndarray) -> np.ndarray:
        x = x[..., max(-top, 0) : x.shape[-2] + min(bottom, 0), max(-left, 0) : x.shape[-1] + min(right, 0)]
        edges = [(max(top, 0), max(bottom, 0)), (max(left, 0), max(right, 0))]
        made = np.pad(x, [(0, 0)] * (x.ndim - 2) + edges, padding_mode)  # type: ignore[call-overload]
        if padding_mode != "constant" or not np.any(fill):
            return made
        return np.where(np.pad(np.ones(x.shape[-2:], bool), edges), made, _fill_values(x, fill)).astype(x.dtype)

    return _changed("pad", img, padded)


def _color(img: Any, fill: Any) -> Any:
    """Return a fill color with a number per channel, as Pillow requires."""
    values = [0 if fill is None else fill] if not isinstance(fill, list | tuple) else list(fill)
    values = values * get_image_num_channels(img) if len(values) == 1 else values
    values = values if img.mode == "F" else [int(value) for value in values]
    return tuple(values) if len(values) > 1 else values[0]


def crop(img: Any, top: int, left: int, height: int, width: int) -> Any:
    """Crop a window; zeros where it lies outside the image."""
    if is_pil(img):
        return img.crop((left, top, left + width, top + height))
    _, rows, columns = get_dimensions(img)
    sides = [max(-left, 0), max(-top, 0), max(left + width - columns, 0), max(top + height - rows, 0)]
    if any(sides):
        img, left, top = pad(img, sides), left + sides[0], top + sides[1]
    return _changed("crop", img, lambda x: x[..., top : top + height, left : left + width])


def center_crop(img: Any, output_size: Any) -> Any:
    """Crop the center; an image that is too small is padded with zeros."""
    (height, width), (_, rows, columns) = as_pair(output_size), get_dimensions(img)
    if width > columns or height > rows:
        x, y = max(width - columns, 0), max(height - rows, 0)
        img = pad(img, [x // 2, y // 2, (x + 1) // 2, (y + 1) // 2])
        _, rows, columns = get_dimensions(img)
    return crop(img, round((rows - height) / 2), round((columns - width) / 2), height, width)


def resized_crop(
    img: Any, top: int, left: int, height: int, width: int, size: Any, interpolation: Any = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> Any:  # fmt: skip
    """Crop a window and resize it to ``size``, as :func:`resize` does."""
    return resize(crop(img, top, left, height, width), size, interpolation, antialias=antialias)


def hflip(img: Any) -> Any:
    """Flip horizontally."""
    return img.transpose(0) if is_pil(img) else _changed("hflip", img, lambda x: x[..., ::-1])


def vflip(img: Any) -> Any:
    """Flip vertically."""
    return img.transpose(1) if is_pil(img) else _changed("vflip", img, lambda x: x[..., ::-1, :])


def erase(img: Tensor, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False) -> Tensor:
    """Set the window of height ``h`` and width ``w`` at row ``i`` and column ``j`` to ``v``."""
    values = v.to_host() if isinstance(v, Tensor) else np.asarray(v)

    def erased(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[..., i : i + h, j : j + w] = values
        return x

    made = _changed("erase", img, erased)
    return img.from_host(made.to_host()) if inplace else made


# ---- geometry


def rotate(
    img: Any, angle: float, interpolation: Any = InterpolationMode.NEAREST, expand: bool = False, center: Any = None, fill: Any = None
) -> Any:
    """Rotate counterclockwise about the center, or about ``center`` (x, y); ``expand`` enlarges the result to hold the corners."""
    if is_pil(img):
        return img.rotate(angle, _PILLOW[_interpolation_mode(interpolation)], expand, center, fillcolor=_color(img, fill))
    return affine(img, -angle, (0, 0), 1.0, (0.0, 0.0), interpolation, fill, center, _expand=expand)


def affine(
    img: Any, angle: float, translate: Sequence[float], scale: float, shear: Any, interpolation: Any = InterpolationMode.NEAREST,
    fill: Any = None, center: Any = None, _expand: bool = False,
) -> Any:  # fmt: skip
    """Rotate clockwise by ``angle``, shear by ``shear`` degrees (x, or x and y), scale, and translate by pixels."""
    mode, (_, height, width) = _interpolation_mode(interpolation), get_dimensions(img)
    turn, (x_shear, y_shear) = math.radians(angle), map(math.radians, as_pair(shear) if isinstance(shear, list | tuple) else (shear, 0.0))
    linear = np.array([[math.cos(turn - y_shear), -math.sin(turn)], [math.sin(turn - y_shear), math.cos(turn)]])
    linear[:, 0] /= math.cos(y_shear)
    linear[:, 1] -= linear[:, 0] * math.tan(x_shear)
    inverse = np.linalg.inv(linear * scale)
    middle = np.array([width, height]) / 2
    about = np.zeros(2) if center is None else np.asarray(center, float) - middle
    offset = about - inverse @ (about + np.asarray(translate, float))
    matrix = np.concatenate([inverse, offset[:, None]], 1)  # from the result's middle to the image's middle
    if is_pil(img):
        matrix[:, 2] += middle - inverse @ middle
        return img.transform(img.size, 0, matrix.ravel().tolist(), _PILLOW[mode], fillcolor=_color(img, fill))
    if mode not in ("nearest", "bilinear"):
        raise ValueError(message("affine", "interpolation of tensors must be nearest or bilinear", interpolation=mode))
    out: tuple[int, ...] = (height, width)
    if _expand:
        corners = np.array([[x, y, 1] for x in (-width / 2, width / 2) for y in (-height / 2, height / 2)], np.float32)
        corners = corners @ matrix.T.astype(np.float32) + middle.astype(np.float32)  # in float32 as torchvision
        tolerance = np.float32(1e-4)
        low, high = (np.trunc(f(corners, axis=0) / tolerance) * tolerance for f in (np.min, np.max))
        out = tuple(int(n) for n in (np.ceil(high) - np.floor(low))[::-1])
    return _changed("affine", img, lambda x: _sampled(x, matrix, out, mode, fill))


def _sampled(x: np.ndarray, matrix: np.ndarray, out: tuple[int, ...], mode: str, fill: Any) -> np.ndarray:
    """Return an image of size ``out``. ``matrix`` maps its pixels to points of ``x``; coordinates are relative to the image centers."""
    whole, (height, width) = x.reshape(-1, *x.shape[-2:])[None].astype(np.float32), x.shape[-2:]
    size = np.array([width, height], np.float32)  # in float32 as torchvision, which decides ties of the nearest pixel
    y, x_ = (np.arange(n, dtype=np.float32) - np.float32((n - 1) / 2) for n in out)
    places = np.stack([*np.meshgrid(x_, y), np.ones(out, np.float32)], -1)
    points = ((places @ (matrix.T.astype(np.float32) / (size / 2)) + 1) * size - 1)[None] / 2
    if mode == "nearest":
        points = np.rint(points)
    made, inside = (augment.sample_bilinear(image, points)[0] for image in (whole, np.ones_like(whole[:, :1])))
    if fill is not None:
        color = np.reshape(_fill_values(x, fill), (-1, 1, 1)).astype(np.float32)
        made = made * inside + (1 - inside) * np.tile(color, (len(made) // len(color), 1, 1))
    return _rounded_pixels(made, x).reshape(*x.shape[:-2], *out)


# ---- colors


def _gray(x: np.ndarray) -> np.ndarray:
    if x.ndim < 3 or x.shape[-3] not in (1, 3):
        raise ShapeError(message("rgb_to_grayscale", "the image must have 1 channel or 3 (red, green, blue)", shape=x.shape))
    return x if x.shape[-3] == 1 else sum(x[..., [c], :, :] * share for c, share in enumerate(_GRAY)).astype(x.dtype)


def rgb_to_grayscale(img: Any, num_output_channels: int = 1) -> Any:
    """Convert to grayscale, in one channel or three equal ones."""
    if num_output_channels not in (1, 3):
        raise ValueError(message("rgb_to_grayscale", "num_output_channels must be 1 or 3", num_output_channels=num_output_channels))
    if is_pil(img):
        gray = img.convert("L")
        return gray if num_output_channels == 1 else pillow().merge("RGB", [gray] * 3)
    return _changed("rgb_to_grayscale", img, lambda x: np.repeat(_gray(x), num_output_channels, -3))


to_grayscale = rgb_to_grayscale


def _enhanced(op: str, img: Any, factor: float, kind: str, other: Callable[[np.ndarray], Any]) -> Any:
    """Return ``factor * image + (1 - factor) * other(image)``, clipped; for PIL images, the result of Pillow's ``ImageEnhance.<kind>``."""
    if factor < 0:
        raise ValueError(message(op, f"{op.removeprefix('adjust_')}_factor must be at least 0", given=factor))
    if is_pil(img):
        return getattr(pillow("ImageEnhance"), kind)(img).enhance(factor)

    def blended(x: np.ndarray) -> np.ndarray:
        if other is _gray and x.shape[-3:-2] == (1,):
            return x
        wide = _mixing_dtype(x.dtype)
        own, rest = wide.type(factor), wide.type(1 - factor)
        return np.clip(own * x.astype(wide) + rest * np.asarray(other(x), wide), 0, _most(x.dtype)).astype(x.dtype)

    return _changed(op, img, blended)


def adjust_brightness(img: Any, brightness_factor: float) -> Any:
    """Change the brightness by a factor: 0 gives black, 1 the image itself, 2 twice the brightness."""
    return _enhanced("adjust_brightness", img, brightness_factor, "Brightness", lambda x: np.float32(0))


def adjust_contrast(img: Any, contrast_factor: float) -> Any:
    """Change the contrast by a factor: 0 gives uniform gray, 1 the image itself."""
    mean = lambda x: _gray(x).astype(_mixing_dtype(x.dtype)).mean((-3, -2, -1), keepdims=True)  # noqa: E731
    return _enhanced("adjust_contrast", img, contrast_factor, "Contrast", mean)


def adjust_saturation(img: Any, saturation_factor: float) -> Any:
    """Change the saturation by a factor: 0 gives a grayscale image, 1 the image itself."""
    return _enhanced("adjust_saturation", img, saturation_factor, "Color", _gray)


def adjust_hue(img: Any, hue_factor: float) -> Any:
    """Shift the hue by a fraction of the color circle, from -0.5 to 0.5."""
    if not -0.5 <= hue_factor <= 0.5:
        raise ValueError(message("adjust_hue", "hue_factor must be from -0.5 to 0.5", hue_factor=hue_factor))
    if get_image_num_channels(img) == 1 and getattr(img, "mode", "") != "P":
        return img
    if is_pil(img):
        hue, *rest = img.convert("HSV").split()
        turned = hue.point([(value + int(hue_factor * 255)) % 256 for value in range(256)])
        return pillow().merge("HSV", (turned, *rest)).convert(img.mode)

    def turned_colors(x: np.ndarray) -> np.ndarray:
        rgb = x.astype(np.float32) / np.float32(_most(x.dtype))
        top, low = rgb.max(-3), rgb.min(-3)
        spread = top - low
        r, g, b = np.moveaxis(rgb, -3, 0)
        d = np.where(spread == 0, 1, spread)
        hue = np.where(top == r, (g - b) / d, np.where(top == g, 2 + (b - r) / d, 4 + (r - g) / d)) + 6 * np.float32(hue_factor)
        k = (np.array([5, 3, 1], np.float32).reshape(3, 1, 1) + hue[..., None, :, :]) % 6
        made = top[..., None, :, :] - spread[..., None, :, :] * np.clip(np.minimum(k, 4 - k), 0, 1)
        return made.astype(x.dtype) if x.dtype.kind == "f" else (made * np.float32(_most(x.dtype) + 1 - 1e-3)).astype(x.dtype)

    return _changed("adjust_hue", img, turned_colors)


def invert(img: Any) -> Any:
    """Invert the colors."""
    return pillow("ImageOps").invert(img) if is_pil(img) else _changed("invert", img, lambda x: np.asarray(_most(x.dtype), x.dtype) - x)


def gaussian_blur(img: Any, kernel_size: Any, sigma: Any = None) -> Any:
    """Blur with a Gaussian kernel of odd ``kernel_size`` and standard deviation ``sigma``; each is one number or (x, y)."""
    if getattr(img, "mode", "") in ("1", "P"):
        raise ValueError(message("gaussian_blur", "the image must not have mode 1 or P", 'call image.convert("RGB") first', mode=img.mode))
    sizes = as_pair(kernel_size)
    sigmas = [0.15 * n + 0.35 for n in sizes] if sigma is None else [sigma] * 2 if isinstance(sigma, int | float) else as_pair(sigma)
    if any(n % 2 == 0 or n < 1 for n in sizes) or min(sigmas) <= 0:
        what = "kernel_size must be odd and at least 1, and sigma above 0"
        raise ValueError(message("gaussian_blur", what, kernel_size=sizes, sigma=sigmas))
    across, down = (np.exp(-0.5 * ((np.arange(n) - n // 2) / s) ** 2) for n, s in zip(sizes, sigmas, strict=True))
    kernel = np.outer(down / down.sum(), across / across.sum())
    return _changed("gaussian_blur", img, lambda x: _rounded_pixels(filters.convolve(x.astype(np.float32), kernel), x))
