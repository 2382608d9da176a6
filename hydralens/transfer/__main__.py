"""``torchrun --nproc-per-node N -m hydralens.transfer CONFIG.toml``: the command ``hydralens transfer`` on many processes."""

import sys

from hydralens.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "transfer")
    main()
