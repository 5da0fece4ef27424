"""Model sizes: published shapes by name, and expert counts."""
