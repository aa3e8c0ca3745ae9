"""A server of pages of this machine."""

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def pages(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server of this machine whose answers these are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # the one that asked leaves
                answer(self)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.png?b=c"
        server.shutdown()
