"""Objectives: what a run minimises and measures."""
