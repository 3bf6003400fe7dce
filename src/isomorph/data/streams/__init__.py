"""Streams, which are read in order and have no index, and their loaders."""
