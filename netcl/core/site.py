"""Where in the user's program netcl was called from, for texts that point there."""

from __future__ import annotations

import inspect
import os
import traceback

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # a program may live in a folder called netcl too


def user_line() -> traceback.FrameSummary:
    """The innermost line that is running and not netcl's own; the outermost line where all of them are."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def is_own(filename: str) -> bool:
    """Whether a file is a part of netcl."""
    return filename.startswith((PACKAGE, "<op "))  # the second are functions of reductions, which are made of text
