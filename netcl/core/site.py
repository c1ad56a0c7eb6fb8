"""Finds the line of the user's program that called netcl, for messages."""

from __future__ import annotations

import inspect
import os
import traceback

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # a program may live in a folder called netcl too


def user_line() -> traceback.FrameSummary:
    """Return the innermost running line outside of netcl; the outermost line if there is none."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def is_own(filename: str) -> bool:
    """Whether a file belongs to netcl."""
    return filename.startswith((PACKAGE, "<op "))  # the second pattern matches generated functions of reductions
