"""Carry the weights of a model to another implementation of its function, by what both compute."""
