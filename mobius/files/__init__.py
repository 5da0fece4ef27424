"""Files that are replaced whole, and regular files that are read as data."""
