"""Record a step and replay it: ``netcl.compile`` and ``capture_graph``. Start reading at :mod:`netcl.replay.compiled`."""
