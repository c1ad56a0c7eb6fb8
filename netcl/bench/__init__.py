"""Measuring netcl against what people know: cases that run the same problem here, in torch and in NumPy, side by side.

:mod:`netcl.bench.harness` says how times are taken, :mod:`netcl.bench.problems` and :mod:`netcl.bench.steps` hold what ``netcl bench``
times. What only the repository measures is in its folder ``benchmarks``.
"""

from netcl.bench.harness import Case, Comparison, Setting, Way, measure, setting

__all__ = ["Case", "Comparison", "Setting", "Way", "measure", "setting"]
