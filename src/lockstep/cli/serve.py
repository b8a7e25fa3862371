"""`lockstep serve`: a model over the OpenAI API."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from lockstep.cli.config_file import settings_from_file
from lockstep.serve.config import EngineOptions, HttpConfig
from lockstep.serve.listener import bind

if TYPE_CHECKING:
    from lockstep.serve.service import ServedModel

API_KEY_VARIABLE = "LOCKSTEP_API_KEY"

command = App(name="serve", config=settings_from_file)

_Flat = Parameter(name="*")  # the fields are flags of their own, without a prefix


@command.default
def serve(
    model: str,
    /,
    *,
    served_model_name: Annotated[
        tuple[str, ...], Parameter(consume_multiple=True, negative="")
    ] = (),
    http: Annotated[HttpConfig, _Flat] = HttpConfig(),  # noqa: B008 (frozen)
    engine: Annotated[EngineOptions, _Flat] = EngineOptions(),  # noqa: B008
    api_key: str | None = None,
    config: Path | None = None,
) -> None:
    """Serve a model over the OpenAI API until SIGTERM or SIGINT.

    Parameters
    ----------
    model
        A name such as smollm2, a Hugging Face folder or a GGUF file.
    served_model_name
        Names the model answers to, the first one reported; default: MODEL as given.
    api_key
        Key that clients must send; better given as LOCKSTEP_API_KEY, which `ps` does not show.
    config
        TOML file with settings under the names of these flags; flags win.
    """
    listener = bind(http.host, http.port)
    from lockstep.serve.server import Server  # after the port is known to be free

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("lockstep").setLevel(logging.INFO)
    names = served_model_name or (model,)
    Server(
        http,
        listener,
        lambda: _load(model, engine),
        names=names,
        api_key=api_key or os.environ.get(API_KEY_VARIABLE) or None,
        on_ready=lambda url: _say_ready(url, names[0]),
    ).run()


def _load(model: str, options: EngineOptions) -> ServedModel:
    """Runs in a thread: torch takes seconds to import, and `/health` answers 503 meanwhile."""
    from lockstep.serve.loading import load_served_model

    return load_served_model(model, options)


def _say_ready(url: str, name: str) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    print(f"ready: {name} at {url}/v1")
    print(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print("stop: Ctrl-C or SIGTERM", flush=True)
