"""Turns the name of a dataset into batches that are equal on every rank; works with text and numpy only."""
