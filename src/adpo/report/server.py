"""The page from a server on this machine, which reads the folders anew whenever it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from adpo.report.page import data_of, harmless, page, sections_of

HERE = "127.0.0.1"


def server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Ready to serve: the page and its data, nothing else; 0 is a port that is free."""
    answers: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html; charset=utf-8", lambda: page(sections_of(folders), live=True)),
        "/data.json": ("application/json", lambda: harmless(data_of(sections_of(folders), live=True))),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = answers.get(self.path)
            if known is None or self.headers.get("Host", "").rsplit(":", 1)[0] not in (HERE, "localhost"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            kind, make = known
            try:
                body = make().encode()
            except ValueError as error:  # a folder that has gone
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error)[:200])
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """A page that asks every few seconds would fill the terminal."""

    try:
        return ThreadingHTTPServer((HERE, port), Handler)
    except OSError as error:
        raise ValueError(f"--serve {port}: {error.strerror}; choose another port") from None
