"""Services on top of core: compiled programs and measured configurations on disk, streams, and timers."""
