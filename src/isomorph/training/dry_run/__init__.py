"""Dry runs: what a recipe would train, need and cost, found without its data."""
