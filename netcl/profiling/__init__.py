"""Profiling: device times of kernels, wall times of calls, traces and reports."""

from netcl.profiling.events import EventTimer, Launch
from netcl.profiling.profiler import profile
from netcl.profiling.report import KernelRow
from netcl.profiling.timing import Timing, compare, measure

__all__ = ["EventTimer", "KernelRow", "Launch", "Timing", "compare", "measure", "profile"]
