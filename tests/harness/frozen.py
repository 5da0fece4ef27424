"""What every run makes once in its process, made before processes are forked, and left out of garbage collections.

A collection touches, and so copies, all that a forked process shares with the one that it is forked from.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mobius.config import config
from mobius.models import attention

config.spellings()
# transformers compiles a thousand patterns for all of its families, and torch looks for the source of each operation.
get_checkpoint_conversion_mapping("llama")
attention._operation()
gc.collect()
gc.freeze()
