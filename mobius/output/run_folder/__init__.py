"""The folder of a run on the disk: what is recognized in it, and how the final weights get into it."""
