"""Recipes: their fields, checks, files and command-line overrides."""

from isomorph.training.recipe.recipe import (
    Recipe,
    changes,
    check,
    document_fields,
    identity,
    override,
    read_file,
    with_defaults,
)

__all__ = ["Recipe", "changes", "check", "document_fields", "identity", "override", "read_file", "with_defaults"]
