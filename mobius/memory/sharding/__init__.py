"""Stages that replicas share: their sums are reduced, and their weights gathered, beside computation."""
