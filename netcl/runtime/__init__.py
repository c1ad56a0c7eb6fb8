"""Services over core: compiled programs on disk, measured configurations, streams."""
