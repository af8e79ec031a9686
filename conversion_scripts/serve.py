"""Serve an IHA checkpoint with `transformers serve`, an OpenAI-compatible server, and all its options.

`transformers serve` looks up the class of a checkpoint among the names of `transformers`, even with
`--trust-remote-code`, so it does not find a class outside the library. This command adds the class. It runs the
installed package, not the code in the checkpoint.
"""

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from common.command_io import UserError, locate_checkpoint, refusing, run_cli


def answer_help() -> None:
    """Print how to start the server, and exit, where the command line asks for help: Transformers' takes seconds."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        usage = f"{sys.argv[0]} [MODEL] [--host HOST] [--port PORT] [--continuous-batching] [option ...]"
        print(f"usage: {usage}\n\n{__doc__}\nThe other options are those that `transformers serve --help` lists.")
        print(f"\nexample: {sys.argv[0]} smollm2-iha --port 8000")
        sys.exit()


if __name__ == "__main__":
    run_cli(answer_help)  # before the imports below, which take seconds

import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from common.checkpoint_io import check_filled, load_config, load_config_dict
from common.foreign_code import note_foreign_code


STOP_SECONDS = 5  # less than the ten after which `docker stop` kills


class WholeModel(AutoModelForCausalLM):
    """Refuse weights that do not fill the model, where Transformers gives random ones in their place."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        loaded: Any = super().from_pretrained(*arguments, output_loading_info=True, **options)
        model, info = loaded
        check_filled(info, arguments[0])
        return model


def check_address(host: str, port: int) -> None:
    """Raise `UserError` for an address that the server cannot use, because loading the model first takes long.

    Other machines may not reach it: it asks for no key, loads any model by name, and bounds neither requests nor
    their number. vLLM's server does this better than a layer around Transformers' server could.
    """
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not ipaddress.ip_address(str(address[0])).is_loopback:
            advice = "Leave it at localhost, and serve others with vLLM and --api-key (vllm_iha/README.md)"
            raise UserError(f"--host {host}: other machines could use this server without a key. {advice}.")
        try:
            socket.create_server(address, family=family).close()
        except OSError as error:
            # Of the addresses of a name, the server ignores those that this machine lacks.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise


def answer_this_machine_only(app: Any, host: str) -> None:
    """Have the server refuse what a web page that the user visits sends it, in the user's browser.

    A page may lead a name of its own to this machine, and then reads what it likes. Else it cannot read an answer, but
    could unload the model.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse

    @app.middleware("http")
    async def refuse_other_origins(request, call_next):
        own = f"{request.url.scheme}://{request.url.netloc}"
        if request.headers.get("origin", own) != own:
            return PlainTextResponse("This server answers no page of another origin.", status_code=403)
        return await call_next(request)

    names = ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)


def check_continuous_batching(path: str, use_cuda_graph: bool | None) -> None:
    """Raise the error of `init_continuous_batching`, which the server would meet at the first request."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(path))
    model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=use_cuda_graph))


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted, or raise `UserError`."""
    import uvicorn  # here: a plain installation lacks it, and `run_cli` says so

    def config_of(app, host, **options):
        answer_this_machine_only(app, host)
        # By default one Ctrl-C, and any number of SIGTERMs, wait for every reply that has begun.
        return uvicorn.config.Config(app, host=host, timeout_graceful_shutdown=STOP_SECONDS, **options)

    for name in ("IHAForCausalLM", "InterleavedForCausalLM"):
        setattr(transformers, name, WholeModel)
    setattr(uvicorn, "Config", config_of)  # `Serve` has no option for either
    app = typer.Typer()
    app.command()(Serve)
    command: Any = typer.main.get_command(app)
    start = command.callback

    def serve(**options):
        check_address(options["host"], options["port"])
        if options["enable_cors"]:
            raise UserError("--enable-cors: any web page could use this server without a key. Leave it out.")
        model = options["force_model"] or ""
        if "@" in model and os.path.isdir(model):
            why = "the server takes what follows @ for a revision of another model"
            raise UserError(f"{model}: {why}. Rename the directory.")
        if model:
            locate_checkpoint(model.partition("@")[0])
        # The model is loaded before the server starts; the type of the error depends on the library that reads it.
        with refusing(f"The server cannot start with {model or 'these options'}", Exception):
            if not options["trust_remote_code"] and os.path.isdir(model):
                config = load_config_dict(model)
                note_foreign_code(model)
                if options["continuous_batching"] and config.get("model_type") in ("iha", "interleaved"):
                    check_continuous_batching(model, options["cb_use_cuda_graph"])
            if model:
                # The server refuses all other names, and would list those in the Hub's cache, or fail without one.
                served = {"id": model, "object": "model", "created": 0, "owned_by": ""}
                setattr(ModelManager, "get_gen_models", staticmethod(lambda cache_dir=None: [served]))
            start(**options)

    command.callback = serve
    command.main(argv, prog_name=sys.argv[0])


if __name__ == "__main__":
    run_cli(main)
