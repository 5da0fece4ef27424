"""The plan of a run: which layer goes where, what it takes, how long a step lasts, and what this machine measures."""
