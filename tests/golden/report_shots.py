"""A page of a run with known numbers, and pictures that a browser takes of it; run as a program it writes the references.

Letters are hidden, because machines have different fonts; boxes, lines, dots and cells remain.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from netcl.trainer import plot
from netcl.trainer.report_html import PAGE_STYLE, _charts

SCHEMES = {"light": 1, "dark": 0}  # Chromium's numbers
WIDTH, HEIGHT, BLOCK = 800, 1000, 8
HIDDEN = "* { color: transparent !important; } svg text { display: none; } table.confusion * { font-size: 0; width: 40px; height: 24px; }"


def browser() -> str | None:
    """The program of a Chromium on this machine."""
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


def rows(decay: float = 15.0) -> list[dict]:
    """The log of a run of 40 steps in four epochs; ``decay`` is the number of steps in which the loss falls to a third."""
    found: list[dict] = []
    for epoch in range(4):
        losses = [2 * math.exp(-step / decay) + 0.1 * math.sin(step) for step in range(10 * epoch + 1, 10 * epoch + 11)]
        rates = [0.01 * (1 - step / 40) for step in range(10 * epoch, 10 * epoch + 10)]
        step = 10 * epoch + 10
        numbers = {"loss": losses[-1], "losses": losses, "lr": rates[-1], "lrs": rates, "since": step - 9, "grad_norm": 1 / (1 + epoch)}
        found.append({"kind": "step", "step": step, **numbers})
        means = {"loss": sum(losses) / 10, "val_loss": 1.1 * sum(losses) / 10, "samples_per_second": 1000 + 100 * epoch}
        found.append({"kind": "epoch", "step": step, "epoch": epoch, **means})
    return found


def charts(decay: float = 15.0) -> str:
    """The page: curves, residuals and a confusion matrix."""
    dots = plot.scatter_chart("residuals", [(i / 10, math.sin(i)) for i in range(40)], "true", None)
    matrix = plot.confusion_table(np.array([[9, 1, 0], [0, 8, 2], [4, 0, 6]]), ["a", "b", "c"])
    body = f'<div class="charts">{_charts(rows(decay))}{dots}</div><br><div class="scroll">{matrix}</div>'
    style = f"<style>{PAGE_STYLE}{plot.PLOT_STYLE}{HIDDEN}</style>"
    return f"<!doctype html><html lang='en'><head><meta charset='utf-8'>{style}</head><body>{body}</body></html>"


def shot(page: str, scheme: str, folder: Path) -> np.ndarray:
    """The page as the browser draws it without a network, as means over blocks of pixels."""
    from PIL import Image

    (folder / "page.html").write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}"]
    options += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={folder / 'page.png'}"]
    subprocess.run([browser() or "", *options, (folder / "page.html").as_uri()], capture_output=True, timeout=120)
    pixels = np.asarray(Image.open(folder / "page.png").convert("RGB"), np.float64)
    return pixels.reshape(HEIGHT // BLOCK, BLOCK, WIDTH // BLOCK, BLOCK, 3).mean(axis=(1, 3))


def main() -> None:
    from PIL import Image

    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory() as folder:
            blocks = shot(charts(), scheme, Path(folder))
        Image.fromarray(np.round(blocks).astype(np.uint8)).save(Path(__file__).parent / f"report_{scheme}.png", optimize=True)


if __name__ == "__main__":
    main()
