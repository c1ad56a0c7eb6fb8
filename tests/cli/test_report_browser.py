"""The charts of a report in a real browser, light and dark, against reference pictures (tests/golden/report_shots.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
_spec = importlib.util.spec_from_file_location("report_shots", GOLDEN / "report_shots.py")
shots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shots)
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.skipif(shots.browser() is None, reason="Chromium is not installed")


@pytest.mark.parametrize("scheme", shots.SCHEMES)
def test_charts_are_drawn_in_the_colors_of_the_scheme(scheme, tmp_path):
    blocks = shots.shot(shots.charts(), scheme, tmp_path)
    background = {"light": (255, 255, 255), "dark": (0x14, 0x18, 0x1F)}[scheme]
    assert np.abs(blocks[0, 0] - background).max() < 1
    other = shots.shot(shots.charts(decay=60.0), scheme, tmp_path)
    assert np.abs(blocks - other).max() > 50  # other numbers look otherwise


@pytest.mark.soak  # fonts of another machine move the boxes
@pytest.mark.parametrize("scheme", shots.SCHEMES)
def test_charts_look_as_they_did(scheme, tmp_path):
    wanted = np.asarray(Image.open(GOLDEN / f"report_{scheme}.png"), np.float64)
    blocks = shots.shot(shots.charts(), scheme, tmp_path)
    assert np.abs(blocks - wanted).max() < 25  # versions draw edges a little differently
