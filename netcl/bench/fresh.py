"""``python -m netcl.bench.fresh``: one training step of a small CNN on the default device; the time is that of the process."""

import math

from netcl.bench.steps import small_cnn_step

if __name__ == "__main__" and not math.isfinite(small_cnn_step()):
    raise SystemExit("the first loss is not finite")
