"""Sizes of models: published ones by name, and counts of experts."""
