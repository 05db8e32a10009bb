"""Entry of the console script `kvquant` and of `python -m kvquant_eval`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

_NEEDED = ("typer", "rich", "pandas", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `kvquant` with ``arguments`` (default: the process's) and returns the exit code."""
    if any(find_spec(module) is None for module in _NEEDED):
        print("kvquant: the command line needs its extra: pip install 'kvquant[eval]'", file=sys.stderr)
        return 2
    _lenient_streams()
    try:
        from .cli import run

        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(f"kvquant: the result can't be written: {error.strerror}", file=sys.stderr)
        os._exit(1)  # Python would try to write what is left once more
    except KeyboardInterrupt:
        print("kvquant: interrupted", file=sys.stderr)
        return 130


def _lenient_streams() -> None:
    """Have names and signs that a terminal cannot show escaped, and closed streams swallow what is written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
