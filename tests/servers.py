"""Serve a checkpoint in a separate process."""

import socket
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from multiprocessing import get_context

from iha.serving import serve


def _serve(arguments):
    sys.argv = ["serve", *arguments]
    serve.main()


def _answers(url, process):
    """Wait for a server, and return whether it answers. It ends if another process has taken its port."""
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return process.is_alive()
        time.sleep(0.2)
    return False


@contextmanager
def answering(*arguments):
    """Yield the address of a server, which runs in a separate process."""
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [*arguments, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        process = get_context("fork").Process(target=_serve, args=(words,))  # a new one would import PyTorch
        process.start()
        url = f"http://127.0.0.1:{port}"
        if _answers(url, process):
            break
        process.kill()
    else:
        raise AssertionError("no server answers")
    try:
        yield url
    finally:
        process.kill()  # a fork stays with the threads of its parent if it is asked to end
        process.join(30)
