"""Serve a checkpoint in a process of its own."""

import socket
import sys
import time
import urllib.request
from contextlib import contextmanager
from multiprocessing import get_context

from conversion_scripts import serve


def _serve(arguments):
    sys.argv = ["serve", *arguments]
    serve.main()


@contextmanager
def answering(*arguments):
    """Yield the address of a server, which runs in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*arguments, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    process = get_context("fork").Process(target=_serve, args=(arguments,))  # a new one would import PyTorch
    process.start()
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.is_alive() and time.monotonic() < deadline, "no server answers"
                time.sleep(0.2)
        yield url
    finally:
        process.kill()  # a fork stays with the threads of its parent if it is asked to end
        process.join(30)
