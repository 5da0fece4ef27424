"""Files of other trainers as they are: whose a file is, and what each of its keys becomes here.

A tool is a `Recipe`: rows that answer for every key, and a function for the keys that are taken together.
docs/user/other_trainers.md is made from the rows (`python -m mobius.config.recipes > docs/user/other_trainers.md`).
"""
