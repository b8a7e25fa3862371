"""`lockstep fetch`: download a named model into the cache."""

from __future__ import annotations

from cyclopts import App

command = App(name="fetch")


@command.default
def fetch(model: str) -> None:
    """Download a model into the cache, check it, convert it, and print its folder.

    Parameters
    ----------
    model
        smollm2 (98 MB, the default of every example) or qwen2.5-coder-0.5b (491 MB).
    """
    from lockstep.models.fetch import fetch_model

    print(fetch_model(model))
