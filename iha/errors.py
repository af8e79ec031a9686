"""Turn the errors of all commands into one line."""

import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar


Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parents[1]
IS_CHECKOUT = (ROOT / "setup.py").is_file()  # else this is an installed wheel, without recipes, studies and documents
# The extras of setup.py that bring a package, if they are not "scripts".
EXTRAS = {"uvicorn": "serve"}
EXTRAS |= dict.fromkeys(("lm_eval", "markdown_it", "math_verify", "wonderwords"), "scripts,evaluation")


class UserError(Exception):
    """Report a mistake that the user can fix, in one line: what was wrong, what was expected, what to do."""


def run_cli(main: Callable[[], Result]) -> Result:
    """Return what a command's `main` returns, and turn its errors into one line on stderr and an exit code.

    The code is 130 for Ctrl-C and 1 for every exception. For an exception that is neither a mistake of the user nor an
    error of the system, such as a full disk, the line names a file with the traceback. The option --traceback of
    every command shows the traceback instead. Help names the command as it was started.
    """
    if not sys.stderr.isatty():  # a log would keep every state of a progress bar
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # for Transformers too, if it is imported later
        if "huggingface_hub" in sys.modules:
            sys.modules["huggingface_hub"].utils.disable_progress_bars()
        if "transformers" in sys.modules:
            sys.modules["transformers"].utils.logging.disable_progress_bar()
    if not sys.warnoptions:
        for category in (FutureWarning, SyntaxWarning):  # a library's, for its callers; our tests show them
            warnings.simplefilter("ignore", category)
    given = sys.argv
    sys.argv = [word for word in sys.argv if word != "--traceback"]
    if (file := Path(given[0].removesuffix(".py"))).is_relative_to(ROOT):
        sys.argv[0] = f"python -m {'.'.join(file.relative_to(ROOT).parts)}"
    try:
        if "" in sys.argv[1:]:  # as a path it would be the current directory
            empty = f"argument {sys.argv.index('', 1)} is empty"
            raise UserError(f"{empty}: expected a value; is a variable of the shell not set?")
        result = main()
        sys.stdout.flush()
        return result
    except KeyboardInterrupt as interrupt:
        print("Interrupted.", *getattr(interrupt, "__notes__", ()), file=sys.stderr)
        sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
    except SystemExit:
        raise
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python writes the rest at its end
        sys.exit(128 + signal.SIGPIPE)
    except BaseException as error:  # the panics of Rust's libraries are no `Exception`
        if "--traceback" in given:
            raise
        print(f"Error: {_explained(error)}", file=sys.stderr)
        sys.exit(1)
    finally:
        sys.argv = given


def _explained(error: BaseException) -> str:
    """Return one line on an exception that ended a command, which names a file with the traceback of a defect."""
    # Libraries wrap the system's error in their own exception types, and keep its wording.
    of_the_system = any(text in str(error) for text in ("(os error ", "can't allocate memory"))
    if isinstance(error, UserError | OSError | MemoryError) or of_the_system:
        return one_line(error)
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2"):  # the Hub's client, of two generations
        return f"the Hub does not answer: {one_line(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name and find_spec(name := error.name.split(".")[0]) is None:
        return missing(name)
    calls = traceback.extract_tb(error.__traceback__)
    # In an installation our own files are in site-packages too.
    ours = [call for call in calls if "site-packages" not in call.filename] or calls
    doing = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    place = f"{Path(ours[-1].filename).name}, line {ours[-1].lineno}"
    what = f"{doing:.300} failed in {place}: {type(error).__name__}: {one_line(error):.500}; --traceback shows more"
    with suppress(OSError), tempfile.NamedTemporaryFile("w", prefix="traceback-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
        what += f", as does {file.name}"
    return f"{what}."


def missing(package: str) -> str:
    """Return the message about a package that is not installed."""
    return f"the package {package} is not installed: {how_to_install(EXTRAS.get(package, 'scripts'))}."


def how_to_install(extras: str) -> str:
    """Return what to do for packages of these extras of setup.py, in a checkout or with a wheel."""
    if IS_CHECKOUT:
        return f'run pip install -e ".[{extras}]" in the checkout'
    return f'run pip install "modeling-iha[{extras}]"'


def check_packages(*names: str) -> None:
    """Raise `UserError` if a package of a command is not installed, before the imports of its file fail."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(missing(name))


def similar(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known: the names that are similar."""
    found = get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; similar: {', '.join(found)}" if found else ""


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line, or the name of its class when it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def refusing(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn these exceptions of the block into a `UserError` that says `what` and the library's message."""
    try:
        yield
    except errors as error:
        raise UserError(f"{what}: {one_line(error)}") from error
