"""From a user's own files to a report and to predictions, by one command each."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import sys
import time

import numpy as np
import pytest

from netcl import cli
from netcl.core.device import manager
from netcl.data import FormatError, files, tables
from netcl.data.files import READERS, SplitPlan, parts, read_inputs
from netcl.io import load_model, read_notes
from netcl.trainer import run as run_folder
from netcl.trainer.pictures import picture
from netcl.trainer.recipe import Recipe, RecipeError, load_data

SMALL = ["--device", "cpu", "--epochs", "3", "--batch-size", "16", "--model-options", "hidden=[16]"]


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def houses(tmp_path):
    """A table with numbers, texts, empty cells and a quantity to predict."""
    rng = np.random.default_rng(0)
    path = tmp_path / "houses.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "rooms", "town", "id", "price"])
        for i in range(120):
            size, rooms, town = rng.uniform(40, 200), rng.integers(1, 6), rng.choice(["Bonn", "Köln"])
            price = round(1000 * size + 20000 * rooms + 50000 * (town == "Bonn"))
            writer.writerow([f"{size:.1f}" if i % 10 else "", rooms, town, f"h{i}", price])
    return path


@pytest.fixture
def flowers(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "flowers.csv"
    rows = [(a, b, "rose" if a + b > 0 else "lily") for a, b in rng.standard_normal((150, 2)).round(3)]
    path.write_text("a;b;kind\n" + "".join(f"{a};{b};{kind}\n" for a, b, kind in rows))
    return path


def test_a_table_with_a_quantity_becomes_a_report_and_predictions(houses, tmp_path, capsys):
    words = ["--data", f"csv:{houses}", "--target", "price", "--data-options", 'drop=["id"]', "--lr", "0.03", "--epochs", "12", *SMALL[4:]]
    status, out, err = run(capsys, "train", *words, "--device", "cpu", "--run", tmp_path / "run")
    assert status == 0, err
    assert "val_mae" in err and "r2" in out and "the best by val_loss" in out
    results, config = (json.loads((tmp_path / "run" / name).read_text()) for name in ("results.json", "config.json"))
    assert config["model"] == "mlp" and results["test"]["r2"] > 0.5 and 1000 < results["test"]["mae"] < 60000
    page = (tmp_path / "run/report.html").read_text()
    assert "Residuals" in page and "Worst mistakes" in page and "Confusion" not in page
    status, out, _ = run(capsys, "predict", tmp_path / "run/model.netcl", houses, "--device", "cpu", "--out", tmp_path / "p.csv")
    with (tmp_path / "p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert status == 0 and header == ["file", "row", "price"] and len(rows) == 120
    with houses.open(newline="", encoding="utf-8") as file:
        prices = [float(row["price"]) for row in csv.DictReader(file)]
    assert np.corrcoef(prices, [float(row[2]) for row in rows])[0, 1] > 0.8


def test_a_table_with_names_is_a_classification(flowers, tmp_path, capsys):
    words = ["--data", f"csv:{flowers}", "--target", "kind", "--lr", "0.05", *SMALL]
    assert run(capsys, "train", *words, "--run", tmp_path / "run")[0] == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["classes"] == ["lily", "rose"] and results["test"]["accuracy"] > 0.8
    assert "lily" in (tmp_path / "run/report.html").read_text()
    status, out, _ = run(capsys, "predict", tmp_path / "run/model.netcl", flowers, "--device", "cpu")
    chosen = [line.split()[2] for line in out.splitlines()[1:]]
    right = [line.split(";")[2] for line in flowers.read_text().splitlines()[1:]]
    assert status == 0 and np.mean([a == b for a, b in zip(chosen, right, strict=True)]) > 0.85


def test_the_test_and_validation_parts_are_apart_and_follow_the_seed(flowers):
    def rows(part):
        return {tuple(part[i][0]) for i in range(len(part))}

    loaded = [load_data(Recipe().changed({"data": f"csv:{flowers}", "target": "kind", "seed": seed})) for seed in (0, 0, 1)]
    shares = [[rows(part) for part in (data.train, data.val, data.test)] for data in loaded]
    assert sum(map(len, shares[0])) == 150 and all(13 <= len(part) <= 17 for part in shares[0][1:])
    assert not shares[0][0] & shares[0][1] and not shares[0][0] & shares[0][2] and not shares[0][1] & shares[0][2]
    assert shares[0] == shares[1] != shares[2]
    digits = load_data(Recipe())
    assert len(digits.test) == 355 and len(digits.train) + len(digits.val) == 1442 and len(digits.val) == 143


def test_parts_divide_every_class():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    val, test, train = parts(labels, 100, [0.1, 0.2], seed=3)
    assert [np.bincount(labels[part]).tolist() for part in (val, test, train)] == [[5, 3, 2], [10, 6, 4], [35, 21, 14]]
    assert sorted([*val, *test, *train]) == list(range(100))


def test_scales_are_those_of_the_training_part(flowers):
    found = READERS["csv"](flowers, SplitPlan(target="kind"))
    x = np.stack([found.train[i][0] for i in range(len(found.train))])
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(0), 1, rtol=1e-5)


def test_a_text_of_a_later_table_that_training_did_not_see_is_no_class(houses, tmp_path):
    reading = READERS["csv"](houses, SplitPlan(target="price"), drop=["id"]).reading
    (tmp_path / "new.csv").write_text("town,rooms,size\nUlm,3,\nBonn,3,100\n")
    x = read_inputs(tmp_path / "new.csv", reading)
    assert x.shape == (2, 4) and x[0].tolist()[2:] == [0.0, 0.0] and x[0, 0] == 0.0 and x[1].tolist()[2:] == [1.0, 0.0]


def test_arrays_bring_their_own_test_part_or_not(tmp_path, capsys):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (60, 8, 8), np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "all.npz", images=x, labels=y)
    np.savez(tmp_path / "two.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    whole, two = (READERS["npz"](tmp_path / f"{name}.npz", SplitPlan()) for name in ("all", "two"))
    assert [len(part) for part in (whole.train, whole.val, whole.test)] == [48, 6, 6] and whole.reading["shape"] == [1, 8, 8]
    assert len(two.test) == 20 and two.test[0][1] == y[40] and len(two.train) + len(two.val) == 40
    np.testing.assert_allclose(two.test[0][0][0], x[40] / 255, rtol=1e-6)
    words = ["--data", f"npz:{tmp_path}/two.npz", "--model", "cnn", "--model-options", "width=4", *SMALL[:6], "--epochs", "1"]
    assert run(capsys, "train", *words, "--run", tmp_path / "run")[0] == 0
    np.save(tmp_path / "new.npy", x[:2])
    assert "probability" in run(capsys, "predict", tmp_path / "run/model.netcl", tmp_path / "new.npy", "--device", "cpu")[1]
    np.save(tmp_path / "new.npy", x[:2, :4])
    status, _, err = run(capsys, "predict", tmp_path / "run/model.netcl", tmp_path / "new.npy", "--device", "cpu")
    assert status == 1 and "an input must have the shape that the model was trained on; shape=(1, 4, 8), expected=(1, 8, 8)" in err


def test_numbers_to_predict_in_arrays_are_a_regression(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "r.npz", x=rng.standard_normal((50, 3)), y=rng.standard_normal((50, 2)) * 7 + 3)
    data = load_data(Recipe().changed({"data": f"npz:{tmp_path}/r.npz"}))
    assert data.is_regression and data.outputs == 2 and data.train[0][1].shape == (2,) and data.train[0][0].dtype == np.float32


def test_labels_in_arrays_may_be_a_column_or_one_hot(tmp_path):
    labels = np.arange(60) % 3
    recipe = Recipe(data=f"npz:{tmp_path}/c.npz")
    for y in (labels[:, None], np.eye(3)[labels]):
        np.savez(tmp_path / "c.npz", x=np.ones((60, 3)), y=y)
        data = load_data(recipe)
        assert (data.is_regression, data.classes, data.outputs) == (False, ("0", "1", "2"), 3)
    assert load_data(recipe.changed({"task": "regression"})).outputs == 3
    np.savez(tmp_path / "c.npz", x=np.ones((60, 3)), y=np.ones((60, 2)))
    with pytest.raises(RecipeError, match="targets of a classification must be one label per sample, or one-hot rows"):
        load_data(recipe.changed({"task": "classification"}))
    with pytest.raises(RecipeError, match=r"\[recipe\] target is not a setting of this data"):
        load_data(recipe.changed({"target": "y"}))


def test_a_folder_of_idx_files(tmp_path):
    rng = np.random.default_rng(0)
    for name, array in (("train-images-idx3", rng.integers(0, 255, (40, 4, 4))), ("train-labels-idx1", np.arange(40) % 2 + 5)):
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))
    found = READERS["idx"](tmp_path, SplitPlan())
    assert found.classes == ("5", "6") and len(found.test) == 4 and found.train[0][0].shape == (1, 4, 4)


def test_a_text_file_needs_one_option(tmp_path, capsys):
    (tmp_path / "song.txt").write_text("the quick fox\n" * 60)
    size = ["--model-options", "n_layer=1", "n_head=2", "n_embd=16", "block_size=8", "--epochs", "2", "--device", "cpu"]
    status, _, err = run(capsys, "train", "--data", f"text:{tmp_path}/song.txt", *size, "--run", tmp_path / "run")
    assert status == 0 and "val_loss" in err and (tmp_path / "run/report.html").exists()
    status, _, err = run(capsys, "predict", tmp_path / "run/model.netcl", tmp_path / "song.txt", "--device", "cpu")
    assert status == 1 and "`netcl generate RUN` writes text" in err


def test_a_class_of_the_user(flowers, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from netcl import nn\n"
        "class TwoLayersOfMine(nn.Module):\n"
        "    def __init__(self, in_features, num_classes, width=8):\n"
        "        super().__init__()\n"
        "        self.first, self.second = nn.Linear(in_features, width), nn.Linear(width, num_classes)\n"
        "    def forward(self, x):\n"
        "        return self.second(self.first(x).relu())\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["train", "--data", f"csv:{flowers}", "--target", "kind", "--model", "mine.py:TwoLayersOfMine", *SMALL[:6]]
    assert run(capsys, *words, "--model-options", "width=4")[0] == 0
    model = load_model(tmp_path / "runs/csv-flowers-TwoLayersOfMine/model.netcl", "cpu")
    assert model.first.weight.shape == (4, 2) and read_notes(tmp_path / "runs/csv-flowers-TwoLayersOfMine/model.netcl")["target"] == "kind"
    status, _, err = run(capsys, *words[:-6], "--model", "mine:Missing", "--device", "cpu")
    assert status == 1 and "the model cannot be found" in err and "FILE.py:CLASS" in err


def test_early_stopping_and_the_found_rate(flowers, tmp_path, capsys):
    words = ["--data", f"csv:{flowers}", "--target", "kind", *SMALL, "--find-lr", "--patience", "1", "--epochs", "40"]
    status, out, _ = run(capsys, "train", *words, "--run", tmp_path)
    config, results = (json.loads((tmp_path / name).read_text()) for name in ("config.json", "results.json"))
    assert status == 0 and f"learning rate {config['lr']:g} (found" in out and config["lr"] != Recipe().lr
    assert results["best"]["epoch"] < results["best"]["of"] < 40


def test_the_search_for_a_rate_shows_where_it_is(flowers, monkeypatch):
    """Its first step compiles what the training needs, which would be a still screen."""
    told, search = io.StringIO(), run_folder.find_lr

    def slow(batches):
        for i, batch in enumerate(batches):
            deadline = time.monotonic() + 30
            while i == 1 and "learning rate 0/100  training  " not in told.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield batch

    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setenv("NETCL_PROGRESS", "bar")
    monkeypatch.setattr(run_folder, "find_lr", lambda trainer, data: search(trainer, slow(data)))
    recipe = Recipe(data=f"csv:{flowers}", target="kind", batch_size=16, model_options={"hidden": [4]}).resolved()
    assert run_folder.find_rate(recipe, manager.default("cpu")).suggestion > 0
    assert "learning rate 0/100  training  " in told.getvalue() and told.getvalue().endswith("\r")


@pytest.mark.parametrize(
    "content, options, told",
    [
        ("a,b\n1,2\n", ["--target", "c"], "target and drop must be columns of the table; column=c"),
        ("a,b\n1,2\n", [], "columns are a, b; --target"),
        ("a,b\n1,2\n3\n", ["--target", "b"], "every line must have as many cells as the header; line=3, cells=1, header=2"),
        ("a,b\n1,x\n3,\n", ["--target", "b"], "every target must be given; row=2, column=b"),
        ("a,b\n1,x\n3,y\n", ["--target", "b"], "every part must have at least one sample"),
        ("a,b\n1,x\n3,y\n", ["--target", "b", "--task", "regression"], "targets of a regression must be numbers"),
        ("", ["--target", "b"], "a table must have a header"),
        (
            "a;b\n1,5;x\n3;y\n",
            ["--target", "b"],
            "numbers must be written with a decimal point, and without separators of thousands; cell=1,5",
        ),
        ("a,b\n1,x\n3,y\n", ["--target", "b", "--root", "here"], "root is not a setting of this data"),
        ("a,b\n" + "".join(f"name{i},{i % 2}\n" for i in range(200)), ["--target", "b"], "at most 100 distinct values; column=a"),
    ],
)
def test_a_table_that_cannot_be_used_is_told_in_a_line(content, options, told, tmp_path, capsys):
    (tmp_path / "t.csv").write_text(content)
    status, _, err = run(capsys, "train", "--data", f"csv:{tmp_path}/t.csv", *options, "--run", tmp_path / "run", "--device", "cpu")
    assert status == 1 and told in err and len(err.splitlines()) == 1


def test_files_that_are_not_there_and_kinds_that_are_unknown(tmp_path, capsys):
    status, _, err = run(capsys, "train", "--data", f"csv:{tmp_path}/none.csv", "--target", "x", "--device", "cpu")
    assert status == 1 and "the file or folder must exist" in err
    status, _, err = run(capsys, "train", "--data", "xml:file", "--device", "cpu")
    assert status == 1 and "unknown data" in err and "csv:PATH" in err
    np.savez(tmp_path / "n.npz", a=np.zeros(3))
    status, _, err = run(capsys, "train", "--data", f"npz:{tmp_path}/n.npz", "--device", "cpu")
    assert status == 1 and "the file must have arrays of inputs and targets" in err and "name them x/y" in err


@pytest.fixture
def pictures(tmp_path):
    """Red and blue JPEGs of several sizes, in a folder per class."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("netcl.vision")
    rng = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(20):
            pixels = rng.integers(0, 60, (12 + i % 5, 16, 3), np.uint8)
            pixels[..., channel] += 150
            image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{i}.jpg")
    return tmp_path / "pictures"


def test_a_folder_of_jpegs_becomes_a_report_and_predictions(pictures, tmp_path, capsys):
    words = ["--data", f"folder:{pictures}", "--data-options", "size=8", "--model", "mlp", *SMALL, "--lr", "0.03", "--epochs", "8"]
    status, _, err = run(capsys, "train", *words, "--run", tmp_path / "run")
    assert status == 0, err
    results, page = json.loads((tmp_path / "run/results.json").read_text()), (tmp_path / "run/report.html").read_text()
    assert results["classes"] == ["blue", "red"] and "Predictions" in page and 'alt="red"' in page
    status, out, _ = run(capsys, "predict", tmp_path / "run/model.netcl", *sorted(pictures.rglob("1.jpg")), "--device", "cpu")
    assert status == 0 and [line.split()[2] for line in out.splitlines()[1:]] == ["blue", "red"]


def test_a_folder_may_bring_its_parts(pictures, tmp_path):
    for part in ("train", "test"):
        (tmp_path / "all" / part).mkdir(parents=True)
        for name in ("red", "blue"):
            (tmp_path / "all" / part / name).symlink_to(pictures / name)
    data = load_data(Recipe().changed({"data": f"folder:{tmp_path}/all", "data_options": {"size": 8}, "val_split": 0.25}))
    assert [len(part) for part in (data.train, data.val, data.test)] == [30, 10, 40] and data.shape == (3, 8, 8)
    assert 0.5 < data.test[39][0][0].mean() < 0.9 and data.test[39][1] == 1  # red, the last class
    (tmp_path / "all/test").rename(tmp_path / "all/val")
    data = load_data(Recipe().changed({"data": f"folder:{tmp_path}/all", "data_options": {"size": 8}, "test_split": 0.25}))
    assert [len(part) for part in (data.train, data.val, data.test)] == [30, 40, 10] and data.classes == ("blue", "red")
    with pytest.raises(RecipeError, match=r"at least 2 classes; classes=\['val'\]"):  # the folder above is named by mistake
        (tmp_path / "all/train").rename(tmp_path / "train")
        load_data(Recipe().changed({"data": f"folder:{tmp_path}/all", "data_options": {"size": 8}}))


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path):
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    image.fromarray(np.repeat(np.uint8([[9], [250]]), 2, axis=1)).save(tmp_path / "p.png", exif=exif)
    assert picture(tmp_path / "p.png", (1, 2, 2)).tolist() == [[[250, 9], [250, 9]]]


def test_files_that_are_not_what_they_say_are_refused(tmp_path):
    """Bytes that are no UTF-8 were replaced by a sign, and an NPZ file of any promised size was read."""
    (tmp_path / "latin.csv").write_bytes("name,y\nK\xf6ln,1\n".encode("latin1"))
    with pytest.raises(FormatError, match=r"\[csv\] the file must be a CSV file in UTF-8"):
        files.read_table(tmp_path / "latin.csv")
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(tables.limit_for(0, None) + 1, np.uint8), y=np.zeros(1))
    with pytest.raises(FormatError, match=r"\[npz\] the arrays must not be larger than max_bytes"):
        tables.read_numpy_arrays(tmp_path / "bomb.npz", "npz")
    arrays = {"x_train": np.zeros((4, 2)), "y_train": np.arange(4) % 2, "x_test": np.full((2, 2), "a"), "y_test": np.arange(2)}
    np.savez(tmp_path / "texts.npz", **arrays)
    with pytest.raises(FormatError, match=r"\[npz\] inputs must be numbers .* dtype=<U1"):
        READERS["npz"](tmp_path / "texts.npz", SplitPlan(val=0.0))
    np.save(tmp_path / "short.npy", np.zeros(100))
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-8])
    with pytest.raises(FormatError, match="an entry must have as many bytes as its shape says"):
        files.read_inputs(tmp_path / "short.npy", {"kind": "array", "shape": []})


@pytest.mark.parametrize(
    "train, test, told",
    [
        (np.zeros((8, 6, 6), np.uint8), np.zeros((4, 6, 6)), r"must both be bytes, or neither; train=uint8, test=float64"),
        (
            np.zeros((8, 6, 6, 3)),
            np.zeros((4, 6, 6, 3)),
            r"channels before height and width; x=\(8, 6, 6, 3\), .*; x.transpose",
        ),
    ],
)
def test_arrays_that_would_be_read_wrong_are_refused(tmp_path, train, test, told):
    np.savez(tmp_path / "a.npz", x_train=train, y_train=np.arange(8) % 2, x_test=test, y_test=np.arange(4) % 2)
    with pytest.raises(FormatError, match=told):
        READERS["npz"](tmp_path / "a.npz", SplitPlan())


@pytest.mark.parametrize("trained, given", [("uint8", "int64"), ("int64", "uint8"), ("uint8", "<U1")])
def test_inputs_of_another_scale_are_refused(tmp_path, trained, given):
    """Bytes are divided by 255 and other integers are not: a model of one must not be given the other."""
    x, y = np.arange(80 * 4).reshape(80, 2, 2) % 9, np.arange(80) % 2
    np.savez(tmp_path / "a.npz", x=x.astype(trained), y=y)
    reading = READERS["npz"](tmp_path / "a.npz", SplitPlan()).reading
    np.save(tmp_path / "new.npy", x.astype(given))
    with pytest.raises(files.FormatError, match=f"inputs must be numbers, and bytes where .* bytes; dtype={given}, trained={trained}"):
        read_inputs(tmp_path / "new.npy", reading)
    for same in (trained, "float32"):
        np.save(tmp_path / "new.npy", x.astype(same))
        assert read_inputs(tmp_path / "new.npy", reading).max() == np.float32(8) / np.float32(255 if same == "uint8" else 1)


def test_inputs_without_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz")
    with pytest.raises(files.FormatError, match="the file must have at least one array"):
        read_inputs(tmp_path / "a.npz", {"kind": "array", "shape": [2]})


@pytest.mark.fault("resume over other data", "a class renamed, another seed of the parts", "refused; the run is unchanged")
def test_a_resumed_run_has_the_classes_and_parts_that_it_began_with(flowers, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(capsys, "train", "--data", f"csv:{flowers}", "--target", "kind", *SMALL, "--run", folder)[0] == 0
    for options, name in ((["--seed", 5], "seed"), ([], "classes")):
        if name == "classes":
            flowers.write_text(flowers.read_text().replace("lily", "tulip"))
        status, _, err = run(capsys, "train", folder, "--epochs", 4, "--resume", "--device", "cpu", *options)
        assert status == 1 and f"before={{'{name}'" in err and len(err.splitlines()) == 1
    flowers.write_text(flowers.read_text().replace("tulip", "lily"))
    assert run(capsys, "train", folder, "--epochs", 4, "--resume", "--device", "cpu")[0] == 0
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + 4
