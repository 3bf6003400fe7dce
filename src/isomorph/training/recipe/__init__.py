"""Recipes: their fields, checks, files and overrides."""
