"""Reads unchanged files of other trainers: finds the tool of a file, and translates each of its keys.

A tool is a `Recipe`: rows that answer for every key, and a function for the keys that are taken together.
docs/user/other_trainers.md is made from the rows (`python -m mobius.config.recipes > docs/user/other_trainers.md`).
"""
