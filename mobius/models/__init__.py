"""Causal language models from transformers, taken apart into an embedding, layers and a head."""
