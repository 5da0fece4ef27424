"""The plan of a run without torch: which layer goes where, what it takes, and how long a step lasts."""
