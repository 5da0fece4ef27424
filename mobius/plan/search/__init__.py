"""Owns the search among plans that fit: levels of what is kept, and what of it waits on the host."""
