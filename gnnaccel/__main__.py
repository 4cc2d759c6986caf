"""The command line: ``python -m gnnaccel COMMAND [arguments]``.

A command is a module with a function ``main(argv) -> exit code`` and one line in
:data:`COMMANDS`. Only the module of the command at hand is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

#: Each command: the module that has its ``main``, and what it does in one line.
COMMANDS: dict[str, tuple[str, str]] = {
    "info": (
        "gnnaccel.info",
        "hardware, versions, which kernel serves which op, and why",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Shows the whole help where argparse would show the usage line only."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The command and its arguments; default: those of the process.

    Returns:
        The exit code of the command.

    Raises:
        SystemExit: Code 2 without a known command, 0 after ``--help``.
    """
    argv = sys.argv[1:] if argv is None else argv
    commands = [f"  {name:10}{text}" for name, (_, text) in COMMANDS.items()]
    parser = _Parser(
        prog="python -m gnnaccel",
        usage="%(prog)s [-h] COMMAND [arguments]",
        description="Tools around gnnaccel, which makes PyTorch Geometric faster.",
        epilog="\n".join(["commands (COMMAND --help says more):", *commands]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    module, _ = COMMANDS[parser.parse_args(argv[:1]).command]
    try:
        code: int = import_module(module).main(argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # as in `| head`: what was read was enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
