"""Recipes: their fields, checks, files and command-line overrides."""
