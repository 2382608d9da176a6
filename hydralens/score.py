"""``torchrun --nproc-per-node N -m hydralens.score MODEL --out DIR``: the command ``hydralens score`` on many processes."""

import sys

from hydralens.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "score")
    main()
