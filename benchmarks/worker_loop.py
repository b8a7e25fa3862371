"""The child's side of a worker: one JSON request a line on stdin, one JSON answer a line on stdout.

Whatever a library prints goes to stderr, so it cannot be taken for an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]


def arguments() -> argparse.Namespace:
    """What each worker is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


def serve(load: Callable[[argparse.Namespace], Mapping[str, Handler]]) -> None:
    """Load, say so with an empty answer, then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    handlers = load(arguments())
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(handlers[request.pop("op")](**request)) + "\n")
