"""Files that are replaced as a whole, and regular files that are read as data."""
