"""Configuration of a run: the table of options, their reading and validation, and the command that starts a run."""
