"""The plan of a run and the schedule that follows from it: ordered lists of typed actions, checked before they run."""
