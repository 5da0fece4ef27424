"""Attention of a long sequence that is computed slice by slice, forward in order and backward in reverse."""
