"""Typed errors for mistakes a user can make and mend.

Each is also a stdlib type, so callers that know nothing of Lockstep still catch it. A message is
one sentence: what was got, what was wanted, and the remedy, in numbers. The CLI prints the sentence
alone and exits 2; bugs of our own stay ordinary exceptions with a traceback.
"""


class LockstepError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(LockstepError, ValueError):
    """A setting is unknown, out of range, or contradicts another; raised before any work starts."""


class CheckpointError(LockstepError, ValueError):
    """A model or training checkpoint is missing, truncated, damaged, or of an unsupported kind."""


class DataError(LockstepError, ValueError):
    """A data file or a record in it cannot be used as asked; names the file and the record."""


class FetchError(LockstepError, OSError):
    """A named asset could not be downloaded, or what came does not match its checksum."""


class RequestError(LockstepError, ValueError):
    """A generation request is invalid; `param` names the field, in the OpenAI API's terms."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CapacityError(LockstepError, RuntimeError):
    """The work needs more of a fixed resource (KV blocks, memory) than there is; says both."""
