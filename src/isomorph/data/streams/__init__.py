"""Labelled images read in passing: sources without an index, and their loaders."""
