"""What every run makes once in its process, made before processes are forked, and left out of garbage collections.

A collection touches, and so copies, all that a forked process shares with the one that it is forked from.
"""

import gc

from mobius.config import config

config.spellings()
gc.collect()
gc.freeze()
