"""The command line: parse, call, print. ``hydralens --help`` lists the verbs."""

import sys

from hydralens.errors import InputError


def main() -> None:
    """Entry point. Exit codes: 0 done; 2 the input is wrong (one line on stderr); 130 interrupted; 1 anything else (with a traceback)."""
    try:
        # Inside the try, so that an interrupt during the slow imports ends quietly too.
        from typer.exceptions import TyperException

        from hydralens.cli.app import app
    except KeyboardInterrupt:
        _end("interrupted", 130)
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except InputError as error:
        _end(str(error), 2)
    except TyperException as error:  # an unknown verb, option or value
        _end(f"{error.format_message()} (see hydralens --help)", 2)
    if code == 130:
        _end("interrupted; nothing half-written is left, and the same command goes on where it stopped", 130)
    sys.exit(code or 0)


def _end(line: str, code: int) -> None:
    print(f"hydralens: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(code)
