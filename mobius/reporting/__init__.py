"""Reports of a run: its events, their log lines and files, trackers, traces and pictures."""
