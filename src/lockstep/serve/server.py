"""The server process: take the port, load in the background, say when ready, drain on a signal.

The port is bound before anything is loaded, so a clash shows at once, and `/health` answers 503
while the model loads. SIGTERM or SIGINT stops accepting, lets requests under way finish for
`drain_s` seconds, then cancels them; further SIGTERMs change nothing (supervisors repeat them), a
second SIGINT ends the process at once. A clean stop exits 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette

from lockstep.serve.app import build_app
from lockstep.serve.config import HttpConfig
from lockstep.serve.listener import BACKLOG
from lockstep.serve.service import ServedModel, Service

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

logger = logging.getLogger("lockstep.serve")


class Server:
    """One model over HTTP. `run` returns after a clean shutdown, or raises what stopped it."""

    def __init__(
        self,
        config: HttpConfig,
        listener: socket.socket,
        load: Callable[[], ServedModel],
        *,
        names: tuple[str, ...],
        api_key: str | None = None,
        on_ready: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`load` runs in a thread; `on_ready` hears the URL once requests are answered."""
        self.service = Service(config, names=names, api_key=api_key)
        self._load = load
        self._on_ready = on_ready
        self._load_error: BaseException | None = None
        self._socket = listener
        self.app = build_app(self.service)
        self.app.router.lifespan_context = self._lifespan
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self.app,
                log_level="warning",
                access_log=False,
                lifespan="on",
                backlog=BACKLOG,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
                server_header=False,
            ),
            on_stop=self._on_stop,
        )

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until a signal or `stop`."""
        self._uvicorn.run(sockets=[self._socket])
        if self._load_error is not None:
            raise self._load_error

    def stop(self) -> None:
        """Begin the shutdown; safe from any thread."""
        self._uvicorn.should_exit = True

    def _on_stop(self) -> None:
        self.service.is_draining = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loading: Future[ServedModel] = Future()
        loop = asyncio.get_running_loop()
        loading.add_done_callback(lambda done: _call_soon(loop, self._on_loaded, done))
        # A daemon, so that a signal while a large model loads ends the process at once.
        threading.Thread(target=_fulfil, args=(loading, self._load), daemon=True).start()
        yield
        self.service.is_draining = True
        if loading.done() and loading.exception() is None:
            await asyncio.to_thread(loading.result().engine.close)

    def _on_loaded(self, loading: Future[ServedModel]) -> None:
        self._load_error = loading.exception()
        if self._load_error is not None:
            self.service.failure = str(self._load_error)
            self.stop()
            return
        model = loading.result()
        self.service.set_model(model)
        logger.info("generation defaults of the model: %s", model.defaults.described())
        self._on_ready(self.url)


def _fulfil(future: Future[ServedModel], work: Callable[[], ServedModel]) -> None:
    try:
        result = work()
    except BaseException as error:  # a thread's boundary: the main thread raises it
        future.set_exception(error)
    else:
        future.set_result(result)


def _call_soon(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[Future[ServedModel]], None],
    argument: Future[ServedModel],
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
        loop.call_soon_threadsafe(function, argument)


class _Uvicorn(uvicorn.Server):
    """Uvicorn, but a signal is a request to stop and not raised again afterwards, so we exit 0."""

    def __init__(self, config: uvicorn.Config, *, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by `serve`; outside the main thread (in tests) signals cannot be caught."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        caught = []
        with contextlib.suppress(ValueError, RuntimeError):
            for number in signals:
                loop.add_signal_handler(number, self._on_signal, number)
                caught.append(number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self.should_exit:
            os._exit(EXIT_INTERRUPTED)
        self._on_stop()
        self.should_exit = True
