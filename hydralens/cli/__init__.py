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
        code = app(prog_name="hydralens", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except InputError as error:
        _end(str(error), 2)
    except TyperException as error:  # an unknown verb, option or value
        _end(_usage(error), 2)
    if code == 130:
        _end("interrupted; nothing half-written is left, and 'run' (or 'score --resume') goes on where it stopped", 130)
    sys.exit(code or 0)


def _usage(error: Exception) -> str:
    """The parser's message, with the value that it leaves out and the verb whose help tells more."""
    given = "".join(f", not {detail['input']!r}" for detail in error.__cause__.errors()) if error.__cause__ else ""
    verb = error.ctx.command_path if error.ctx else "hydralens"
    message = error.format_message().rstrip(".") or "no verb was given"  # the help, which is shown then, is no message
    return f"{message}{given}; see {verb} --help"


def _end(line: str, code: int) -> None:
    print(f"hydralens: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(code)
