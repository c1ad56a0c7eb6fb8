"""Augmentations and filters against what they say they do, and the device's against NumPy's."""

import numpy as np
import pytest

import netcl
from netcl.data import augment, augment_gpu, filters

ALL = {
    "Normalize": ([0.1, 0.2, 0.3], [1, 2, 3]),
    "RandomHorizontalFlip": (),
    "RandomVerticalFlip": (),
    "RandomCrop": (6, 2),
    "RandomAffine": (30, 0.2, (0.8, 1.2), 10),
    "RandomRotation": (45,),
    "ColorJitter": (0.3, 0.4, 0.5),
    "RandomErasing": (0.7,),
    "Cutout": (3,),
}


@pytest.fixture
def images():
    return np.random.default_rng(0).random((6, 3, 9, 7)).astype(np.float32)


def generator():
    return np.random.default_rng(5)


@pytest.mark.parametrize("name", ALL)
def test_the_device_gives_what_numpy_gives(device, images, name):
    on_host = getattr(augment, name)(*ALL[name])(images, generator())
    there = getattr(augment_gpu, name)(*ALL[name])(netcl.Tensor.from_host(device.queue, images), generator())
    np.testing.assert_allclose(there.to_host(), on_host, rtol=1e-5, atol=1e-5)
    assert on_host.dtype == np.float32 and not np.array_equal(on_host, images)


@pytest.mark.parametrize("name", ["Mixup", "CutMix"])
def test_mixed_images_have_mixed_labels(device, images, name):
    labels = np.array([0, 1, 2, 3, 0, 1])
    x, y = getattr(augment, name)(4, 0.5)(images, labels, generator())
    tensors = (netcl.Tensor.from_host(device.queue, values) for values in (images, labels))
    there = getattr(augment_gpu, name)(4, 0.5)(*tensors, generator())
    for got, wanted in zip(there, (x, y), strict=True):
        np.testing.assert_allclose(got.to_host(), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
    assert y.shape == (6, 4) and ((y > 0).sum(1) <= 2).all()


@pytest.mark.parametrize("name", ALL)
def test_a_sample_is_a_batch_of_one(images, name):
    part = getattr(augment, name)(*ALL[name])
    np.testing.assert_array_equal(part(images[0], generator()), part(images[:1], generator())[0])
    with pytest.raises(ValueError, match=rf"\[{name}\] images must have the shape"):
        part(images[0, 0], generator())


def test_geometry():
    x = np.arange(2 * 5 * 5, dtype=np.float32).reshape(2, 1, 5, 5)
    np.testing.assert_array_equal(augment.RandomHorizontalFlip(1.0)(x, generator()), x[..., ::-1])
    np.testing.assert_array_equal(augment.RandomVerticalFlip(1.0)(x, generator()), x[..., ::-1, :])
    np.testing.assert_allclose(augment.RandomRotation((90, 90))(x, generator()), np.rot90(x, 1, (2, 3)), atol=1e-4)
    np.testing.assert_array_equal(augment.RandomAffine()(x, generator()), x)
    cropped = augment.RandomCrop(3)(x, generator())
    assert all((window == windows).all((-2, -1)).any() for window, windows in zip(
        cropped[:, 0], np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), axis=(1, 2)), strict=True))  # fmt: skip
    with pytest.raises(ValueError, match="the window must fit into the padded image"):
        augment.RandomCrop(9, padding=1)(x, generator())


def test_erasing_and_noise(images):
    erased = augment.Cutout(3, value=9)(images, generator())
    assert ((erased == 9).sum((1, 2, 3)) == 27).all()
    untouched = augment.RandomErasing(p=0)(images, generator())
    np.testing.assert_array_equal(untouched, images)
    noise = augment.GaussianNoise(0.5)(np.zeros((8, 1, 32, 32), np.float32), generator())
    assert noise.std() == pytest.approx(0.5, rel=0.05)


def test_compose(images):
    both = augment.Compose(augment.RandomCrop(5), augment.Normalize([0, 0, 0], [2, 2, 2]))
    np.testing.assert_allclose(both(images, generator()), augment.RandomCrop(5)(images, generator()) / 2)
    with pytest.raises(ValueError, match="must all run in NumPy or all on the device"):
        augment.Compose(augment.RandomCrop(5), augment_gpu.Normalize([0], [1]))


def test_filters(images):
    flat = np.full((3, 9, 9), 0.25, np.float32)
    for smooth in (filters.box, filters.gaussian, filters.median, filters.sharpen):
        np.testing.assert_allclose(smooth(flat), flat, rtol=1e-6)
        assert smooth(images).shape == images.shape and smooth(images).dtype == np.float32
    for edges in (filters.sobel, filters.laplacian):
        np.testing.assert_allclose(edges(flat), 0, atol=1e-7)
    speck = np.zeros((7, 7), np.uint8)
    speck[3, 3] = 255
    assert filters.median(speck).max() == 0 and filters.box(speck)[3, 3] == pytest.approx(255 / 9, rel=1e-5)
    ramp = np.tile(np.arange(9.0), (9, 1))
    np.testing.assert_allclose(filters.sobel(ramp)[:, 1:-1], 1)
    np.testing.assert_allclose(filters.convolve(ramp, np.ones((1, 3)))[:, 1:-1], 3 * ramp[:, 1:-1])
    assert images.std() > filters.gaussian(images, 2).std()
    for wrong in (lambda: filters.box(flat, 2), lambda: filters.gaussian(flat, 0), lambda: filters.gaussian(flat, 20)):
        with pytest.raises(ValueError, match=r"\[(convolve|gaussian)\]"):
            wrong()


def test_an_augmentation_needs_no_loader():
    x = np.ones((2, 1, 6, 6), np.float32)
    assert augment.Compose(augment.RandomCrop(4), augment.Normalize([1.0], [2.0]))(x).tolist() == np.zeros((2, 1, 4, 4)).tolist()
    mixed, labels = augment.Mixup(3)(x, np.array([0, 2]))
    assert mixed.shape == x.shape and labels.sum() == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"\[RandomCrop\] sizes must be at least 1"):
        augment.RandomCrop(0)
