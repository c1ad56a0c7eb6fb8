"""Finds the line of the user's program that called netcl, and removes netcl's frames from tracebacks of errors it raises on purpose.

Tracebacks then end in the user's line. An exception hook shortens them when they are printed.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

from netcl.core import env

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # a program may live in a folder called netcl too
NOTE = "netcl's own frames are hidden; NETCL_TRACEBACK=full shows them"


def user_line() -> traceback.FrameSummary:
    """Return the innermost line of the call stack outside of netcl; the outermost line if all of them are in netcl."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def is_own(filename: str) -> bool:
    """Whether a file belongs to netcl."""
    return filename.startswith((PACKAGE, "<op "))  # the second pattern matches generated functions of reductions


def without_own_frames(error: BaseException) -> bool:
    """Remove netcl's frames from the tracebacks of an error raised by netcl on purpose and its causes; returns whether any were removed."""
    hidden, seen = False, set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        hidden |= _shorten(following)
        following = following.__cause__ or following.__context__
    return hidden


def _shorten(error: BaseException) -> bool:
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    shown = [e for e in entries if not is_own(name := e.tb_frame.f_code.co_filename) and name != "<frozen runpy>"]
    # Errors raised on purpose have the form of errors.message; any other error inside netcl is a defect of netcl and is printed in full.
    if not shown or not entries or not is_own(entries[-1].tb_frame.f_code.co_filename) or not str(error).startswith("["):
        return False
    for one, following in zip(shown, [*shown[1:], None], strict=True):
        one.tb_next = following
    error.__traceback__ = shown[0]
    return len(shown) < len(entries)


def _prepared(error: BaseException | None) -> TracebackType | None:
    if error is None:
        return None
    if env.value("NETCL_TRACEBACK") == "short" and without_own_frames(error) and hasattr(error, "add_note"):
        error.add_note(NOTE)
    return error.__traceback__


def install_tracebacks() -> None:
    """Install the hook that hides netcl's frames: in the interpreter, in threads and, if it is running, in IPython."""
    plain, of_thread = sys.excepthook, threading.excepthook

    def shown(kind: Any, error: Any, entries: Any) -> None:
        plain(kind, error, _prepared(error) if error is not None else entries)

    def shown_of_thread(given: Any) -> None:
        of_thread(threading.ExceptHookArgs((given.exc_type, given.exc_value, _prepared(given.exc_value), given.thread)))

    sys.excepthook, threading.excepthook = shown, shown_of_thread
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.set_custom_exc((Exception,), lambda shell, kind, error, *_: shell.showtraceback((kind, error, _prepared(error))))
