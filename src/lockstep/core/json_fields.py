"""Typed reading of a JSON object somebody else wrote, with errors that name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lockstep.core.errors import CheckpointError

MAX_COUNT = 2**31 - 1


class JsonFields:
    """Reads keys of one object; a missing key without default, or a wrong type, is a
    CheckpointError.

    A key that is null counts as missing. `where` names the object in messages.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT
    ) -> int:
        """An integer from `low` to `high`."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._present(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:  # false for NaN, too
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where the key is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.where} has no {key}")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} must be {wanted}, got {value!r}")
