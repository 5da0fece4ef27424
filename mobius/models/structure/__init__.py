"""Decoders that declare a pipeline plan of embedding, layers and norm, taken by what their own code does."""
