"""Fine-tunes a language model: `torchrun --nproc_per_node N main.py [--config FILE.yaml] [options]`. See --help."""

from mobius.__main__ import main

if __name__ == "__main__":
    main()
