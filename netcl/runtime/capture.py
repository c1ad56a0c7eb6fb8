"""The public names of recording and replaying, which :mod:`netcl.replay` defines."""

from netcl.replay.compiled import CaptureError, CompiledFunction, capture_graph, compile
from netcl.replay.graph import Graph

__all__ = ["CaptureError", "CompiledFunction", "Graph", "capture_graph", "compile"]
