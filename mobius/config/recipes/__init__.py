"""Reads unchanged files of other trainers: finds the tool of a file, and translates each of its keys.

A tool is a `Recipe`: a row for every key, and a function for the keys that depend on each other. docs/user/
other_trainers.md is generated from the rows: `python -m mobius.config.recipes > docs/user/other_trainers.md`.
"""
