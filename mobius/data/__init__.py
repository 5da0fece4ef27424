"""The way from a dataset's name to the batches that every rank draws alike; all of it text and numpy."""
