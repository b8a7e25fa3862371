"""Taking the port. Apart from the server, so that it happens before anything heavy is imported."""

from __future__ import annotations

import errno
import socket

from lockstep.core.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, or ConfigError in one sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Only a listening socket claims the port: two can be bound to it with SO_REUSEADDR.
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            message = (
                f"port {port} on {host} is in use; choose another with --port (0 takes a free one)"
            )
            raise ConfigError(message) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from None
    return listener
