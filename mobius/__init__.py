"""Mobius fine-tunes all parameters of a large language model on one node with a few memory-limited GPUs.

Importing this package imports none of its parts; `__main__.py` starts the program.
"""

__version__ = "0.2.0"
