"""Entry point of ``python -m benchmarks``."""

import sys
from pathlib import Path


def _prefer_the_installed_package() -> None:
    """Lets an installed gnnaccel win over the checkout's ``gnnaccel`` folder.

    ``python -m`` puts the current folder first on ``sys.path``, and there lies
    gnnaccel's source *without* its compiled kernels: the benchmark would then time
    the fallback. With nothing installed the folder still serves, as the last resort.
    """
    root = str(Path(__file__).resolve().parents[1])
    if root in sys.path:
        sys.path.remove(root)
        sys.path.append(root)


if __name__ == "__main__":
    _prefer_the_installed_package()
    from benchmarks.cli import main

    sys.exit(main())
