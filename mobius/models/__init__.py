"""Causal language models from transformers, split into embedding, layers and head."""
