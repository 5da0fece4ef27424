"""Owns all that a run tells of itself: its events, their log lines and files, trackers, traces and pictures."""
