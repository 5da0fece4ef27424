"""A run's whole state on the disk: its files, how they are written beside training, and how a run is taken up again."""
