"""The machine that plays the schedule on one rank."""
