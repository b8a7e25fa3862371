"""`--config FILE.toml`: settings under the names of the flags, which win over it.

A command's App takes it as `config=settings_from_file`. A key that is no flag fails, by name.
"""

from __future__ import annotations

from pathlib import Path

from cyclopts import App, ArgumentCollection
from cyclopts.config import Toml

from lockstep.core.errors import ConfigError


def settings_from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in, from the file that --config names, every argument the command line leaves open."""
    for argument in arguments:
        if "--config" in argument.names and argument.tokens:
            path = Path(argument.tokens[-1].value)
            if not path.is_file():
                raise ConfigError(f"--config {path} is not a file")
            Toml(path, use_commands_as_keys=False)(app, commands, arguments)
