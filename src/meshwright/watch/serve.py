"""The report in a browser, live: on 127.0.0.1 alone, behind a token, and nothing that writes.

Every user of a machine can connect to its loopback, so the address has a token that only who started this knows. A page of
another site cannot read it either: requests must name this host, and no response allows other origins.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.server
import json
import secrets
import socket
import threading
from importlib import resources
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError, MeshwrightError, StorageError
from meshwright.report.page import csp_hash, render
from meshwright.report.run_files import read_run
from meshwright.watch.follow import RunFollower
from meshwright.watch.screen import as_data

__all__: list[str] = []

HOST: Final = "127.0.0.1"
TOKEN_BYTES: Final = 32
_REQUEST_S: Final = 20.0
_CONNECTION_S: Final = 120.0
_MOST_REQUESTS: Final = 16
_MOST_CONNECTIONS: Final = 64
"""Open connections; further ones are closed at once. Everybody on the machine can make some [count]."""


class LiveServer:
    """Serves one run.

    Args:
        folder: The run's folder.
        port: The port; 0 takes a free one.

    Raises:
        ConfigError: The port is taken, or it is not a run's folder.
        StorageError: The system refuses the port.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.follower = RunFollower(folder)
        self.lock = threading.Lock()
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.room = threading.Semaphore(_MOST_REQUESTS)
        self._report: tuple[object, bytes] = (None, b"")
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {HOST} is taken by another program", fix="--port 0 takes a free one"
                ) from error
            why = f"port {port} of {HOST} cannot be listened on: {error.strerror}"
            raise StorageError(why, fix="--port 0 takes a free one") from error
        self._server.live = self
        self.port: int = self._server.server_address[1]

    @property
    def address(self) -> str:
        """The address with the token."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until Ctrl-C, or `close`."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.serve_forever(poll_interval=0.2)

    def state(self) -> bytes:
        """Return how the run is, as JSON."""
        with self.lock:
            return json.dumps(as_data(self.follower.look())).encode()

    def report(self) -> bytes:
        """Return the report; it is made anew where the run has gone on."""
        with self.lock:
            run = self.follower.look().run
            key = (self.follower.num_bytes, len(run.steps), self.folder.joinpath("record.json").exists())
            if self._report[0] != key:
                self._report = (key, render([read_run(self.folder)]).encode(errors="backslashreplace"))
            return self._report[1]

    def close(self) -> None:
        """Stop listening."""
        self._server.server_close()

    def stop(self) -> None:
        """Let `serve` return; from another thread."""
        self._server.shutdown()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST_CONNECTIONS
    address_family = socket.AF_INET
    live: LiveServer

    def __init__(self, *about: Any) -> None:
        self._connections = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__(*about)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, while there are not too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and end a connection that is not through in time, however slowly it goes on."""
        limit = threading.Timer(_CONNECTION_S, _cut_off, (request,))
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop a connection that broke: a browser leaves when it likes."""


def _cut_off(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "meshwright"
    sys_version = ""
    timeout = _REQUEST_S
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        live = self.server.live
        if self.headers.get("Host", "") not in (f"{HOST}:{live.port}", f"localhost:{live.port}"):
            self._answer(421, b"another host was asked for\n")
            return
        _, token, *rest = self.path.partition("?")[0].split("/") if self.path.startswith("/") else ("", "")
        if not hmac.compare_digest(token.encode(errors="replace"), live.token.encode()):
            self._answer(404, b"not found\n")
            return
        if not live.room.acquire(timeout=_REQUEST_S):
            self._answer(503, b"too many requests\n")
            return
        try:
            self._route("/".join(rest))
        except MeshwrightError as error:
            self._answer(500, f"{error.message}\n".encode(errors="backslashreplace"))
        except OSError:
            raise  # the browser has left
        except Exception as error:  # noqa: BLE001 - what a folder of somebody else's holds must not end in silence
            self._answer(500, f"the run's folder cannot be shown: {type(error).__name__}\n".encode())
        finally:
            live.room.release()

    do_HEAD = do_GET  # noqa: N815 - the base class looks for it

    def _route(self, name: str) -> None:
        live = self.server.live
        if name == "":
            page, policy = live_page()
            self._answer(200, page, "text/html; charset=utf-8", policy)
        elif name == "state":
            self._answer(200, live.state(), "application/json")
        elif name == "report":
            self._answer(200, live.report(), "text/html; charset=utf-8", "frame-ancestors 'self'")
        else:
            self._answer(404, b"not found\n")

    def _answer(
        self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8", policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", policy),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: addresses have the token."""


def live_page() -> tuple[bytes, str]:
    """Return the page around the report, and its policy: its own script and style, and this server."""
    text = (resources.files("meshwright") / "watch" / "live.html").read_text(encoding="utf-8")
    style = text.partition("<style>")[2].partition("</style>")[0]
    script = text.partition("<script>")[2].partition("</script>")[0]
    policy = (
        f"default-src 'none'; script-src 'sha256-{csp_hash(script)}'; style-src 'sha256-{csp_hash(style)}'; "
        "connect-src 'self'; frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return text.encode(), policy
