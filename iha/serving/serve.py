"""Serve a checkpoint with `transformers serve`, an OpenAI-compatible server, and all its options.

The server looks for the class of a checkpoint among the names of `transformers`. This command adds those of this
package, and rejects weights that do not fill their models. It runs the installed package, not the code in the
checkpoint.

example: python -m conversion_scripts.serve smollm2-iha --port 8000
"""

import socket
import sys
from functools import wraps
from typing import Any

# To import this replaces the module `transformers`. It comes first, so that the server looks where we add our classes.
import transformers.processing_utils  # noqa: F401
import typer
from transformers.cli.serve import Serve
from transformers.utils import is_serve_available

from iha.errors import UserError, how_to_install


@wraps(Serve)
def start(**options: Any) -> None:
    """Start the server on models of this package too.

    Raise `UserError` for a model that it cannot serve, and where its packages are not installed."""
    if not is_serve_available():
        raise UserError(f"the packages of the server are not installed: {how_to_install('serve')}.")
    if options["continuous_batching"]:
        raise UserError(
            "--continuous-batching keeps one key for each token, and interleaved heads need more: leave it out, or "
            "serve the model by vLLM (docs/SERVE.md)."
        )
    check_port(options["host"], options["port"])
    from . import served_models  # imported only when the options are known to be right

    served_models.find_models()
    if options["force_model"] is not None:
        served_models.check_served(options["force_model"])
    Serve(**options)


def check_port(host: str, port: int) -> None:
    """Raise `UserError` for a port that is in use, or that this user may not open, before a model is loaded."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port} cannot be opened ({error}): choose another --port.") from None


def main() -> None:
    """Serve until interrupted."""
    app = typer.Typer(add_completion=False)
    app.command(help=__doc__)(start)
    app(prog_name=sys.argv[0])
