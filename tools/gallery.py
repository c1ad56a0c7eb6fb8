"""Draws the pictures of docs/gallery.md from runs of the examples: ``python tools/gallery.py [NAME ...]`` writes docs/images/gallery_*.

Images are PNG, made with Pillow; curves and texts are SVG. ``--device`` says where to run; the physics kernel needs OpenCL.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tools")]

from plots import COLOURS, STYLE  # noqa: E402

import netcl  # noqa: E402

WIDTH, HEIGHT = 480, 260


def write(name: str, text: str) -> None:
    (IMAGES / f"gallery_{name}.svg").write_text(text, encoding="utf-8")


def curves(name: str, title: str, lines: Mapping[str, Sequence[float]], x_name: str) -> None:
    """Lines over their index, as an SVG with a legend."""
    left, right, top, bottom = 44, 12, 40, 36
    most, low, high = max(map(len, lines.values())) - 1, 0.0, max(map(max, lines.values()))

    def at(k: int, value: float) -> str:
        x = left + k / most * (WIDTH - left - right)
        return f"{x:.1f},{HEIGHT - bottom - (value - low) / (high - low) * (HEIGHT - top - bottom):.1f}"

    parts = [f'<text class="title" x="{left}" y="18">{html.escape(title)}</text>']
    for value in np.linspace(low, high, 4):
        y = at(0, value).partition(",")[2]
        parts.append(f'<path class="grid" d="M{left},{y}H{WIDTH - right}"/><text x="4" y="{y}">{value:.2f}</text>')
    for number, (label, values) in enumerate(lines.items()):
        points = " ".join(at(k, value) for k, value in enumerate(values))
        dash = ' stroke-dasharray="6 4"' if number else ""
        parts.append(f'<polyline class="line" stroke="{COLOURS[number]}"{dash} points="{points}"/>')
        parts.append(f'<text x="{left + 150 * number}" y="34" style="fill:{COLOURS[number]}">{html.escape(label)}</text>')
    parts.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}">{html.escape(x_name)}</text>')
    write(name, _svg(WIDTH, HEIGHT, parts))


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n{STYLE}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def tiles(name: str, images: Sequence[np.ndarray], captions: Sequence[tuple[str, bool]], columns: int, scale: int) -> None:
    """Images of 0 to 1, gray or (height, width, 3), in a grid; a caption that is wrong is red."""
    from PIL import Image, ImageDraw

    height, width = (scale * size for size in images[0].shape[:2])
    cell = (max(width, 60) + 8, height + 20)
    page = Image.new("RGB", (columns * cell[0], -(-len(images) // columns) * cell[1]), "white")
    draw = ImageDraw.Draw(page)
    for k, (image, (caption, right)) in enumerate(zip(images, captions, strict=True)):
        x, y = k % columns * cell[0] + 4, k // columns * cell[1] + 2
        pixels = Image.fromarray((np.clip(image, 0, 1) * 255).astype(np.uint8))
        page.paste(pixels.resize((width, height), Image.Resampling.NEAREST), (x, y))
        draw.text((x, y + height + 2), caption, fill="black" if right else "red")
    page.quantize(128).save(IMAGES / f"gallery_{name}.png", optimize=True)


def digits() -> None:
    import train_cnn

    from netcl import optim
    from netcl.data import DataLoader, datasets
    from netcl.trainer import Trainer

    netcl.manual_seed(0)
    train, test = datasets.digits()
    model = train_cnn.cnn()
    Trainer(model, optim.AdamW(model.parameters(), lr=3e-3)).fit(DataLoader(train, 32, shuffle=True, seed=0), epochs=6)
    images, labels = (np.asarray(part) for part in test.take(np.arange(len(test))))
    taken = model.eval()(netcl.tensor(images)).argmax(dim=1).numpy()
    mistakes_first(digits.__name__, images, labels, taken, "0123456789", 4)


def mistakes_first(name: str, images: np.ndarray, labels: np.ndarray, taken: np.ndarray, classes: Sequence[str], scale: int) -> None:
    """Sixteen images: up to four mistakes, then a sample of the others."""
    wrong, right = np.flatnonzero(labels != taken)[:4], np.flatnonzero(labels == taken)
    chosen = [*wrong, *right[:: max(1, len(right) // 16)]][:16]
    shown = [image[0] / image.max() if image.shape[0] == 1 else image.transpose(1, 2, 0) for image in images[chosen]]
    tiles(name, shown, [(classes[taken[k]], bool(labels[k] == taken[k])) for k in chosen], 8, scale)


def fashion() -> None:
    import fashion as example

    from netcl.data import datasets

    images, labels, taken = example.train(datasets.fashion_mnist(), 6000, 2)
    mistakes_first("fashion", images, labels, taken, example.CLASSES, 2)


def photos() -> None:
    import photos as example

    with tempfile.TemporaryDirectory() as scratch:
        images, labels, taken, classes = example.train(example.paint(Path(scratch) / "skies", 60), 8, 32)
    mistakes_first("photos", images, labels, taken, classes, 2)


def text() -> None:
    import gpt_text

    out, given = io.StringIO(), sys.argv
    sys.argv = ["gpt_text.py", "--steps", "150", "--device", "auto"]
    with contextlib.redirect_stdout(out):
        gpt_text.main()
    sys.argv = given
    steps = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    written = out.getvalue().split(steps[-1])[1].strip().splitlines()[:11]
    lines = [steps[0], steps[len(steps) // 2], steps[-1], "", *written]
    rows = [f'<text x="10" y="{22 + 17 * k}" xml:space="preserve">{html.escape(line[:88])}</text>' for k, line in enumerate(lines)]
    write("text", _svg(640, 30 + 17 * len(lines), [f'<g style="font-family:monospace">{"".join(rows)}</g>']))


def segmentation() -> None:
    import segmentation as example

    colours = np.array([(0.12, 0.12, 0.16), (0.18, 0.44, 0.86), (0.85, 0.38, 0.17)])
    images, labels, found = example.train(300)
    gray = [np.repeat(np.clip(image[0, ..., None], 0, 1), 3, axis=2) for image in images[:6]]
    shown = [*gray, *(colours[label] for label in labels[:6]), *(colours[label] for label in found[:6])]
    tiles("segmentation", shown, [(word, True) for word in ("image", "true classes", "found") for _ in range(6)], 6, 2)


def heat() -> None:
    import heat as example

    true, found, _ = example.train(150)
    curves("heat", "Conductivity along a rod, found by gradients through 40 steps", {"true": true, "found": found}, "place")


def two_devices() -> None:
    parallel = {name: losses(["--devices", *devices])[0] for name, devices in
                {"one device": ["cl"], "OpenCL and NumPy": ["cl", "cpu"]}.items()}  # fmt: skip
    curves("two_devices", "Loss on the digits, one device and two unlike ones", parallel, "step")


def two_machines() -> None:
    from netcl.distributed.launch import mpiexec

    ranks = losses([], [mpiexec(), "-n", "2"], 2)
    curves("two_machines", "Loss of two ranks, each on its half of a batch", {f"rank {k}": line for k, line in enumerate(ranks)}, "step")


def losses(options: Sequence[str], before: Sequence[str] = (), ranks: int = 1) -> list[list[float]]:
    """The losses of examples/data_parallel.py, by rank."""
    with tempfile.TemporaryDirectory() as scratch:
        program = [sys.executable, str(ROOT / "examples/data_parallel.py"), "--epochs", "3", "--losses", f"{scratch}/losses"]
        subprocess.run([*before, *program, *options], check=True)
        return [json.loads(Path(f"{scratch}/losses.{k}").read_text(encoding="utf-8")) for k in range(ranks)]


PICTURES = {f.__name__: f for f in (digits, fashion, photos, text, segmentation, heat, two_devices, two_machines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*PICTURES], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    with netcl.device(given.device):
        for name in given.names:
            PICTURES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
