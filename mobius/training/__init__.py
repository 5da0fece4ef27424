"""The life of a run: it is composed, trained, measured, saved and reported here."""
