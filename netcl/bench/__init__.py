"""Measuring netcl against what people know: cases that run the same problem here, in torch and in NumPy, side by side.

``netcl bench`` and ``benchmarks/run.py`` are built on this: :mod:`netcl.bench.harness` says how times are taken,
:mod:`netcl.bench.problems` what is computed, :mod:`netcl.bench.steps` whole training steps.
"""

from netcl.bench.harness import Case, Comparison, Setting, Way, measure, setting

__all__ = ["Case", "Comparison", "Setting", "Way", "measure", "setting"]
