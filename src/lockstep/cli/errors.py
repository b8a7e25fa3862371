"""What a user sees when a command fails: one sentence and an exit code, never a stack trace.

LOCKSTEP_TRACEBACK=1 shows the trace of a user error too. Errors of our own keep theirs always.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from lockstep.core.errors import LockstepError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def exit_code_of(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code, or that of the error it raised, having reported it."""
    try:
        code = run()
        sys.stdout.flush()  # so that a reader that has gone away is noticed here
        return code
    except LockstepError as error:
        if os.environ.get("LOCKSTEP_TRACEBACK"):
            raise
        print(f"lockstep: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more as it exits; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
