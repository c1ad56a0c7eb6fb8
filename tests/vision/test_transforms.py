"""Transforms: what is random about them, how they follow the seed, and what they refuse; without Pillow, the error names the extra."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

import netcl
from netcl import nn
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.data import DataLoader, Dataset
from netcl.vision import functional as F
from netcl.vision import transforms as T
from netcl.vision.transforms import v2

Image = pytest.importorskip("PIL.Image")


def picture(height=12, width=16, channels=3):
    array = np.random.default_rng(1).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(array if channels > 1 else array[..., 0])


def tensor(*shape):
    with netcl.device("cpu"):
        return Tensor.from_host(np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / math.prod(shape))


class Drawn(Dataset):
    """Images with a random transform inside the dataset."""

    transform = T.Compose([T.RandomCrop(4), T.ColorJitter(0.5), T.RandomErasing(0.5)])

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.transform(tensor(3, 9, 9)).to_host(), index


def test_a_usual_chain():
    chain = T.Compose([T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize((0.5,) * 3, (0.25,) * 3)])
    made = chain(picture())
    assert (made.shape, made.dtype, made.device) == ((3, 8, 8), "float32", netcl.device("cpu"))
    again = pickle.loads(pickle.dumps(chain))
    netcl.manual_seed(1)
    first = chain(picture()).to_host()
    netcl.manual_seed(1)
    np.testing.assert_array_equal(again(picture()).to_host(), first)
    assert not np.array_equal(chain(picture()).to_host(), first)
    netcl.manual_seed(0)
    assert repr(T.Resize(8)).startswith("Resize(size=8, interpolation=InterpolationMode.BILINEAR")


def test_v2_passes_labels_through():
    chain = v2.Compose([v2.ToImage(), v2.ToDtype(netcl.float32, scale=True), v2.Identity()])
    made, label = chain(picture(), 7)
    assert label == 7 and made.dtype == "float32" and float(made.max()) <= 1
    assert v2.ToDtype(netcl.float32)(v2.ToImage()(picture())).max() > 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_draws_do_not_depend_on_the_number_of_workers(workers):
    def batches(n):
        with DataLoader(Drawn(), 4, seed=3, num_workers=n, use_shared_mem=False) as loader:
            return [x for x, _ in loader] + [x for x, _ in loader]

    wanted, made = batches(0), batches(workers)
    assert not np.array_equal(wanted[0], wanted[3])  # each epoch draws anew
    for x, y in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", [picture, lambda: F.to_tensor(picture())])
def test_crops(kind):
    image = kind()
    for _ in range(20):
        top, left, height, width = T.RandomCrop.get_params(image, (5, 7))
        assert (height, width) == (5, 7) and 0 <= top <= 7 and 0 <= left <= 9
        top, left, height, width = T.RandomResizedCrop.get_params(image, (0.1, 0.5), (0.5, 2.0))
        assert 0 <= top <= 12 - height and 0 <= left <= 16 - width and 0.4 <= width / height <= 2.6
    padded = T.RandomCrop(20, pad_if_needed=True)(image)
    assert F.get_dimensions(padded) == [3, 20, 20]
    assert T.RandomResizedCrop.get_params(image, (4.0, 4.0), (1.0, 1.0)) == (0, 2, 12, 12)  # no draw fits: the middle
    with pytest.raises(
        ValueError, match=r"\[RandomCrop\] the window must fit into the padded image; image=\(12, 16\), size=\(20, 20\); pass padding="
    ):
        T.RandomCrop(20)(image)


def test_probabilities():
    image = tensor(1, 2, 3)
    for p, changed in ((0.0, False), (1.0, True)):
        for made in (T.RandomHorizontalFlip(p), T.RandomVerticalFlip(p), T.RandomInvert(p), T.RandomApply([T.Pad(1)], p)):
            assert (made(image).tolist() != image.tolist()) is changed
    netcl.manual_seed(2)
    flipped = sum(T.RandomHorizontalFlip(0.3)(image).tolist() != image.tolist() for _ in range(300))
    netcl.manual_seed(0)
    assert 60 < flipped < 120
    assert T.RandomChoice([T.Pad(1), T.Pad(2)], p=[0, 1])(image).shape == (1, 6, 7)
    assert T.RandomOrder([T.Pad(1), T.CenterCrop(2)])(image).shape in ((1, 2, 2), (1, 4, 4))
    assert T.RandomGrayscale(1.0)(picture()).mode == "RGB" and T.Grayscale()(picture()).mode == "L"


def test_erasing():
    image = tensor(3, 10, 10)
    made = T.RandomErasing(1.0, scale=(0.2, 0.2), ratio=(1.0, 1.0), value=9)(image).to_host()
    rows, columns = np.nonzero((made == 9).all(0))
    assert rows.size == 16 and np.ptp(rows) == np.ptp(columns) == 3
    noisy = T.RandomErasing(1.0, value="random")(image).to_host()
    assert 2 <= (noisy != image.to_host()).any(0).sum() <= 40
    inplace = image.clone()
    assert T.RandomErasing(1.0, value=1.5, inplace=True)(inplace) is inplace and float(inplace.max()) == 1.5


def test_rotations_and_jitter_stay_in_their_ranges():
    image = tensor(3, 8, 8)
    assert T.RandomRotation(0)(image).tolist() == image.tolist() and T.RandomAffine(0)(image).tolist() == image.tolist()
    assert T.RandomAffine((10, 20), (0.1, 0.1), (0.5, 2.0), (-5, 5, -5, 5))(image).shape == (3, 8, 8)
    assert T.RandomRotation((90, 90), expand=True)(tensor(1, 4, 6)).shape == (1, 6, 4)
    brighter = T.ColorJitter(brightness=(1.5, 1.5))(image).to_host()
    np.testing.assert_allclose(brighter, np.clip(image.to_host() * 1.5, 0, 1), rtol=1e-6)
    assert T.GaussianBlur(3, 1.0)(image).shape == (3, 8, 8)
    for wrong in ({"brightness": -1}, {"hue": 0.7}, {"contrast": (2, 1)}):
        with pytest.raises(ValueError, match=r"\[ColorJitter\] \w+ must be a number from 0 to [\w.]+, or a range"):
            T.ColorJitter(**wrong)


def test_kinds_of_images():
    gray = picture(channels=1)
    assert T.ToTensor()(gray).shape == (1, 12, 16) and T.ToTensor()(np.zeros((4, 5), np.uint8)).shape == (1, 4, 5)
    assert set(T.ToTensor()(gray.convert("1")).to_host().ravel()) <= {0.0, 1.0}
    for mode in ("L", "RGB", "RGBA", "HSV"):
        image = picture().convert(mode)
        back = T.ToPILImage(mode)(T.PILToTensor()(image))
        assert back.mode == mode and np.array_equal(np.asarray(back), np.asarray(image))
        assert np.array_equal(np.asarray(F.to_pil_image(F.to_tensor(image), mode)), np.asarray(image))
    assert (
        T.ConvertImageDtype(netcl.uint8)(T.ConvertImageDtype(netcl.float32)(T.PILToTensor()(gray))).tolist()
        == T.PILToTensor()(gray).tolist()
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: T.Normalize((0.5,), (0.5,))(picture()), TypeError, r"the image must be a tensor of floats; given=Image; put ToTensor"),
        (lambda: T.ToTensor()(tensor(1, 2, 2)), TypeError, r"\[to_tensor\] pic must be a PIL image or an array"),
        (lambda: T.Pad((1, 2, 3))(tensor(1, 2, 2)), ValueError, r"\[pad\] padding must have 1, 2"),
        (lambda: T.Pad(1, padding_mode="wrap")(tensor(1, 2, 2)), ValueError, r"\[pad\] padding_mode must be constant, edge"),
        (lambda: T.Resize(4, "lanczos")(tensor(1, 2, 2)), ValueError, r"must be nearest, nearest-exact, bilinear or bicubic"),
        (lambda: T.GaussianBlur(4)(tensor(1, 8, 8)), ValueError, r"\[gaussian_blur\] kernel_size must be odd"),
        (lambda: F.adjust_hue(tensor(3, 2, 2), 0.6), ValueError, r"\[adjust_hue\] hue_factor must be from -0.5 to 0.5"),
        (lambda: F.convert_image_dtype(tensor(1, 2, 2), "int64"), ValueError, r"floats cannot be converted to int32"),
        (lambda: F.to_dtype(picture()), TypeError, r"\[convert_image_dtype\] the image must be a tensor; given=Image; put ToImage"),
        (lambda: F.to_pil_image(np.zeros((2, 2, 5))), ValueError, r"pic must have 2 or 3 axes and at most 4 channels"),
        (lambda: T.Resize(4)(np.zeros((3, 8, 8))), TypeError, r"\[resize\] the image must be a PIL image or a tensor"),
        (lambda: T.Resize(), TypeError, "missing a required argument: 'size'"),
        (lambda: T.Resize((4, 5), max_size=9)(picture()), ValueError, r"\[resize\] size must be one number or \(height, width\); with"),
        (lambda: T.Resize((4, 5, 6))(picture()), ValueError, r"\[resize\] size must be one number or"),
        (lambda: F.adjust_saturation(tensor(4, 2, 2), 2), ShapeError, r"the image must have 1 channel or 3 \(red, green, blue\)"),
        (lambda: F.to_pil_image(picture()), TypeError, r"\[to_pil_image\] pic must be a tensor or an array; given=Image"),
        (lambda: F.gaussian_blur(picture().convert("P"), 3), ValueError, r"\[gaussian_blur\] the image must not have mode 1 or P"),
        (lambda: T.RandomHorizontalFlip()(picture(), picture()), TypeError, r"only the first value is transformed, but a later one is"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_without_pillow_the_error_names_the_package():
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import numpy as np; from netcl.vision import transforms\n"
        "x = transforms.Resize(4)(transforms.ToTensor()(np.zeros((8, 8, 3), np.uint8)))\n"
        "assert x.shape == (3, 4, 4)\n"
        "try: transforms.ToPILImage()(x)\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[netcl.vision] images that are not tensors require Pillow; pip install pillow\n", done.stderr


def test_transforms_are_modules():
    steps = nn.Sequential(T.Resize(4), T.RandomHorizontalFlip(1.0), T.Normalize([0.5], [0.25]))
    assert steps(netcl.ones(1, 8, 8)).tolist() == [[[2.0] * 4] * 4] and steps.parameters() == []
    assert repr(nn.ModuleList([T.CenterCrop(2), T.ColorJitter(0.5)])).splitlines()[1:3] == [
        "  (0): CenterCrop(size=2)", "  (1): ColorJitter(brightness=(0.5, 1.5), contrast=None, saturation=None, hue=None)",
    ]  # fmt: skip
    same = pickle.loads(pickle.dumps(T.Compose([T.ToTensor(), T.RandomCrop(4, padding=1)])))
    assert same(np.zeros((8, 8, 3), np.uint8)).shape == (3, 4, 4)
