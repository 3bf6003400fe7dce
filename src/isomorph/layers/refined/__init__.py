"""Attention whose maps are refined before they weigh the values (Refiner)."""
