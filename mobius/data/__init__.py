"""From a dataset's name to batches that are equal on every rank; text and numpy only."""
