"""Owns the way from a dataset's name to the batches every rank draws alike.

Does not own tensors or devices: everything here is text and numpy.
"""
