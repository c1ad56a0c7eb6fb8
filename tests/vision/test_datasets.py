"""Datasets of image files under torchvision's names, CSV and NPZ files, and what is refused."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile

import numpy as np
import pytest

import netcl
from netcl.core.errors import DtypeError
from netcl.data import FormatError, tables
from netcl.utils.data import DataLoader
from netcl.vision import datasets, transforms, utils

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    for name, color in (("cat", (255, 0, 0)), ("dog", (0, 255, 0))):
        (tmp_path / name / "more").mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (6 + i, 5), color).save(tmp_path / name / f"{i}.png")
        Image.new("L", (4, 4), 128).save(tmp_path / name / "more" / "gray.bmp")
        (tmp_path / name / "notes.txt").write_text("not an image")
    return tmp_path


def test_a_folder_of_images(folder):
    images = datasets.ImageFolder(folder, transforms.Compose([transforms.Resize((4, 4)), transforms.ToTensor()]))
    assert images.classes == ["cat", "dog"] and images.class_to_idx["dog"] == 1 and len(images) == 6 == len(images.imgs)
    assert images.targets == [0, 0, 0, 1, 1, 1] and images.samples[2][0].endswith("gray.bmp")
    x, y = images[3]
    assert x.shape == (3, 4, 4) and y == 1 and x[:, 0, 0].tolist() == [0.0, 1.0, 0.0]
    with netcl.device("cpu"):
        batches = list(DataLoader(images, batch_size=4, shuffle=True))
    assert sorted(np.concatenate([y.to_host() for _, y in batches]).tolist()) == images.targets and batches[0][0].shape == (4, 3, 4, 4)
    assert datasets.ImageFolder(folder, is_valid_file=lambda path: path.endswith("0.png")).targets == [0, 1]
    assert datasets.ImageFolder(folder, target_transform=lambda label: -label)[4][1] == -1
    files = datasets.DatasetFolder(folder, loader=lambda path: os.path.getsize(path), extensions=(".TXT",))
    assert files[1] == (12, 1) and len(files) == 2
    assert len(datasets.DatasetFolder(folder, str, extensions=".bmp")) == 2
    (folder / "dog" / "1").symlink_to(folder / "cat")
    (folder / "dog" / "10.png").touch()
    files = [path[len(str(folder)) + 5 :] for path, label in datasets.ImageFolder(folder).samples if label]
    assert files == ["0.png", "1.png", "10.png", "1/0.png", "1/1.png", "1/more/gray.bmp", "more/gray.bmp"]  # torchvision's order


def test_folders_that_do_not_fit(folder, tmp_path):
    (folder / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"\[DatasetFolder\] every class must have at least one file; classes=\['empty'\].*pass allow_empty=True"
    ):
        datasets.ImageFolder(folder)
    assert datasets.ImageFolder(folder, allow_empty=True).classes == ["cat", "dog", "empty"]
    with pytest.raises(FileNotFoundError, match="the folder must exist"):
        datasets.ImageFolder(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"the folder must have one subfolder per class.*put images into root/class/"):
        datasets.ImageFolder(folder / "empty")
    with pytest.raises(ValueError, match="exactly one of extensions and is_valid_file must be given"):
        datasets.DatasetFolder(folder, loader=str)


def test_hostile_images(tmp_path, monkeypatch):
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(whole, "PNG")
    cases = {"cut.png": whole.getvalue()[:600], "text.png": b"GIF87 no", "script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=r"\[default_loader\] the file must be a complete image; reason="):
            datasets.default_loader(tmp_path / name)
    (tmp_path / "large.png").write_bytes(whole.getvalue())
    for most in (1000, 100):  # Pillow warns above the limit and raises above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(FormatError, match=r"the image must not have more pixels than the limit; .* raise PIL.Image.MAX_IMAGE_PIXELS"):
            datasets.default_loader(tmp_path / "large.png")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        with pytest.raises(FormatError, match="the file must not be a pipe or a device"):
            datasets.default_loader(tmp_path / "pipe.png")


# ---- sets


@pytest.mark.parametrize("kind", ["MNIST", "FashionMNIST", "KMNIST"])
def test_sets_of_idx_files(kind, tmp_path):
    make = getattr(datasets, kind)
    with pytest.raises(FileNotFoundError, match=rf"\[{kind}\] the files are missing, and netcl downloads nothing.*download them from http"):
        make(tmp_path, download=True)
    raw = tmp_path / kind / "raw"
    raw.mkdir(parents=True)
    pixels = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 3, 4, 4) + pixels.tobytes())
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", 3) + bytes([7, 3, 1]))
    data = make(str(tmp_path), train=False, download=True, transform=transforms.ToTensor())
    image, label = data[1]
    assert (len(data), label, len(data.classes), data.class_to_idx[data.classes[3]]) == (3, 3, 10, 3)
    np.testing.assert_allclose(image.to_host()[0], pixels[1] / 255, rtol=1e-6)
    assert data.data.tolist() == pixels.tolist() and data.targets.tolist() == [7, 3, 1] and data.data.dtype == "uint8"
    assert make(tmp_path)[0][0].size == (4, 4)
    data.data, data.targets = data.data[1:], data.targets[1:]  # a program's own samples
    assert len(data) == 2 and data[0][1] == 3 and np.allclose(data[0][0].to_host()[0], pixels[1] / 255)


@pytest.mark.parametrize(("kind", "place", "labels"), [("CIFAR10", "cifar-10-batches-bin", 1), ("CIFAR100", "cifar-100-binary", 2)])
def test_cifar(kind, place, labels, tmp_path):
    make = getattr(datasets, kind)
    (tmp_path / place).mkdir()
    rng = np.random.default_rng(0)
    names = [*[f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"] if labels == 1 else ["train.bin", "test.bin"]
    for name in names:
        records = rng.integers(0, 10, (2, labels + 3072), np.uint8)
        (tmp_path / place / name).write_bytes(records.tobytes())
    with pytest.raises(FileNotFoundError, match="netcl downloads nothing"):
        make(tmp_path / "elsewhere")
    if labels == 2:
        (tmp_path / place / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)))
    data = make(tmp_path, train=False)
    image, label = data[1]
    assert (image.size, label, len(data)) == ((32, 32), int(records[1, labels - 1]), 2) and len(make(tmp_path)) == (
        10 if labels == 1 else 2
    )
    np.testing.assert_array_equal(np.asarray(image), records[1, labels:].reshape(3, 32, 32).transpose(1, 2, 0))
    assert data.data.shape == (2, 32, 32, 3) and len(data.classes) == (10 if labels == 1 else 100)
    data.targets[1] += 1
    assert data[1][1] == label + 1
    records[0, labels - 1] = 200
    (tmp_path / place / names[-1]).write_bytes(records.tobytes())
    with pytest.raises(FormatError, match="a label must be below"):
        make(tmp_path, train=False)


def python2_pickle(entries, pixels):
    """What Python 2 wrote: strings of bytes, and an array by its parts."""

    def text(value):
        return b"U" + bytes([len(value)]) + value.encode()

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    array += (
        b"J"
        + struct.pack("<i", len(pixels))
        + b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array += b"\x89T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes() + b"tb"
    lists = b"".join(text(key) + b"](" + b"".join(b"K" + bytes([n]) for n in values) + b"e" for key, values in entries.items())
    return b"\x80\x02}(" + lists + text("data") + array + b"u."


def test_cifar_files_of_the_python_version(tmp_path):
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), np.uint8)
    (place / "test_batch").write_bytes(python2_pickle({"labels": [5, 0, 9]}, pixels))
    data = datasets.CIFAR10(tmp_path, train=False, download=True)
    assert data.targets == [5, 0, 9] and data[2][1] == 9
    np.testing.assert_array_equal(data.data[1], pixels[1].reshape(3, 32, 32).transpose(1, 2, 0))
    hostile = b"cos\nsystem\n(U\x04exittR."
    wrong = {b"\x80\x02" + hostile: "refers to os.system", b"\x80\x02}.": "must hold uint8 images", b"junk": "must be one of CIFAR's",
             b"\x80\x02}(U\x04datacnumpy\nndarray\n)RK\x01bU\x06labels](K\x01eu.": "must hold uint8 images",
             python2_pickle({"labels": [5, 0, 10]}, pixels): "one label from 0 to 9 for each",
             python2_pickle({"labels": [5, 0]}, pixels): r"keys=\['data', 'labels'\], shape=\(3, 3072\)"}  # fmt: skip
    for content, reason in wrong.items():
        (place / "test_batch").write_bytes(content)
        with pytest.raises(FormatError, match=reason):
            datasets.CIFAR10(tmp_path, train=False)


def test_fake_data():
    data = datasets.FakeData(3, (3, 4, 5), num_classes=2)
    assert data[1][0].size == (5, 4) and np.array_equal(data[1][0], data[1][0]) and not np.array_equal(data[0][0], data[1][0])
    assert {label for _, label in (data[i] for i in range(3))} <= {0, 1}
    with pytest.raises(IndexError, match=r"index must be in \[0, samples\); index=3, samples=3"):
        data[3]


def test_saved_images_come_back(tmp_path):
    with netcl.device("cpu"):
        x = netcl.tensor(np.random.default_rng(0).integers(0, 256, (3, 4, 5)).astype(np.float32) / 255)
    utils.save_image(x, tmp_path / "a.png")
    np.testing.assert_array_equal(np.asarray(datasets.default_loader(tmp_path / "a.png")), np.rint(x.to_host().transpose(1, 2, 0) * 255))
    file = io.BytesIO()
    utils.save_image([x, x, x], file, format="PNG", nrow=2, padding=1)
    assert Image.open(file).size == (13, 11)
    for call in (lambda x: utils.save_image(x, file), lambda x: utils.make_grid(x, normalize=True)):
        with pytest.raises(DtypeError, match=r"images must be floats; dtype=uint8; call functional.convert_image_dtype"):
            call(x.to("uint8"))


# ---- tables


def test_csv(tmp_path):
    path = tmp_path / "flowers.csv"
    path.write_text("length,width,kind\n1.5,2,rose\n3,4.5,aster\n\n5,6,rose\n")
    data = tables.from_csv(path, target="kind")
    assert data.classes == ("aster", "rose") and data.arrays[1].tolist() == [1, 0, 1] and data.arrays[0].dtype == np.float32
    assert tables.from_csv(path, columns=["width"]).arrays[0].tolist() == [[2.0], [4.5], [6.0]]
    path.write_text("1;2;0\n3;4;1\n")
    plain = tables.from_csv(path, delimiter=";", header=False)
    assert plain.arrays[0].tolist() == [[1.0, 2.0], [3.0, 4.0]] and plain.arrays[1].dtype == np.int64
    assert tables.from_csv(path, target=None, delimiter=";", header=False)[1].tolist() == [3.0, 4.0, 1.0]
    path.write_text("x,y\n1,2\n3,inf\n", encoding="utf-8")
    assert tables.from_csv(path).arrays[1].tolist() == [2.0, np.inf]
    path.write_text("x,y\n1,2\n3,1e300\n", encoding="utf-8")
    with pytest.raises(tables.FormatError, match=r"targets must be numbers of at most 3.4e\+38, or words; largest=1e\+300"):
        tables.from_csv(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a,b\n1,2\n3\n", "line 3 must have as many fields as the first line; fields=1, expected=2"),
        ("a,b,c\nx,2,1\n", "every field of line 2 must be a number; .* name the columns of numbers"),
        ("", "the file must have at least one row"),
        ("a,b\n", "the file must have at least one row"),
        ('a,b\n"1,2\n', "the file must be a CSV file"),
        ("a,b\n1," + "9" * 70000, "the file must be a CSV file"),
    ],
)
def test_csv_files_that_do_not_fit(content, text, tmp_path):
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(FormatError, match=text):
        tables.from_csv(tmp_path / "x.csv")


def test_npz(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.ones((3, 2)), y=np.arange(3))
    assert [array.shape for array in tables.from_npz(path).arrays] == [(3, 2), (3,)] and tables.from_npz(path, "y")[2] == 2
    with pytest.raises(ValueError, match=r"names must be arrays in the file; array=z, arrays=\['x', 'y'\]"):
        tables.from_npz(path, "z")
    with pytest.raises(FormatError, match=r"the arrays must not be larger than max_bytes; bytes=.* pass max_bytes="):
        tables.from_npz(path, max_bytes=100)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match="the file must be a complete NPY or NPZ file"):
        tables.from_npz(path)
    np.savez(path, x=np.array([{"a": 1}], object))
    with pytest.raises(
        FormatError, match=r"an entry must hold numbers or strings, got dtype object; entry=x\.npy, .*; objects are pickled"
    ):
        tables.from_npz(path)
    lying = io.BytesIO()
    np.lib.format.write_array_header_1_0(lying, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    for content, text in ((lying.getvalue() + bytes(80), r"as its shape says; .*shape=\(1099511627776,\), dtype=float64, bytes=80"),
                          (b"no array", "must be an NPY array; entry=x.npy, reason=ValueError")):  # fmt: skip
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", content)
        with pytest.raises(FormatError, match=text):
            tables.from_npz(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("x.npy", bytes(100 << 20))
    with pytest.raises(FormatError, match="the arrays must not be larger than max_bytes"):
        tables.from_npz(path)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_gray_values_of_16_bits_keep_their_upper_8(tmp_path, name):
    values = (np.arange(64, dtype=np.uint16) * 1040).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / name)
    for mode, shape in (("L", (8, 8)), ("RGB", (8, 8, 3))):
        found = np.asarray(datasets.default_loader(tmp_path / name, mode))
        np.testing.assert_array_equal(found, np.broadcast_to((values >> 8).reshape(8, 8, *[1] * (len(shape) - 2)), shape))
    np.testing.assert_array_equal(np.asarray(datasets.default_loader(tmp_path / name, "I")), values)


@pytest.mark.parametrize("values", [np.arange(4, dtype=np.int32) * 100, np.linspace(0, 1, 4, dtype=np.float32)], ids=["integers", "floats"])
def test_gray_values_of_32_bits_have_no_known_range(tmp_path, values):
    Image.fromarray(values.reshape(2, 2)).save(tmp_path / "a.tif")
    with pytest.raises(FormatError, match=r"gray values must have 8 or 16 bits; mode=[IF], low=0"):
        datasets.default_loader(tmp_path / "a.tif", "L")
    whole = np.array([[0, 255], [7, 9]], values.dtype)
    Image.fromarray(whole).save(tmp_path / "b.tif")
    np.testing.assert_array_equal(np.asarray(datasets.default_loader(tmp_path / "b.tif", "L")), whole)
