"""Attention of a long sequence in slices: forward in order, backward in reverse order."""
