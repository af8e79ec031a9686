"""Reading and writing checkpoints the same way in every command.

Errors the user can fix are `UserError`s, an output appears whole or not at all, a checkpoint that does not load without
loss is refused, and a saved directory can be proven to stand on its own in a process that has never seen this package.
"""

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    logging,
)
from transformers.utils.hub import get_checkpoint_shard_files

import modeling_iha  # noqa: F401  registers "iha" with the Auto classes


class UserError(Exception):
    """A mistake the user can fix: what was wrong, what was expected, what to do. Shown as one line."""


def run_cli(main: Callable[[], None]) -> None:
    """Run a command's `main`; a mistake of the user becomes one line on stderr and exit code 1, Ctrl-C exit code 130.

    The same goes for the machine's refusals, such as a full disk. Any other exception is a defect and keeps its traceback.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a log would keep every state of a bar
    try:
        main()
    except KeyboardInterrupt as interrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
    except Exception as error:
        # safetensors, tokenizers and PyTorch wrap the system's error in exception types of their own, and keep its wording.
        refused = ("(os error ", "can't allocate memory")
        if not isinstance(error, (UserError, OSError, MemoryError)) and not any(
            text in str(error) for text in refused
        ):
            raise
        print(f"Error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)


def one_line(error: Exception) -> str:
    """The message of `error` with its line breaks removed, or its class name when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


# A word of what other libraries advise and no command here can follow -> what to say in its place.
_ADVICE = {
    "trust_remote_code": "only code of its own could load it, and no command here runs the code of a checkpoint",
    "weights_only": "it is damaged, or a pickle of more than tensors, which is not read because it could run any code",
}


def _reason(error: Exception) -> str:
    """`one_line(error)`, without advice that no command here can follow."""
    text = one_line(error)
    return next((ours for word, ours in _ADVICE.items() if word in text), text)


@contextmanager
def new_directory(dst: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary sibling of `dst` to write into; it becomes `dst` on success and is removed on any exception, Ctrl-C,
    SIGTERM and SIGHUP. What a killed run left is removed by the next one for the same `dst`.

    Raises `UserError` before anything is done when `dst` exists and is anything but an empty directory, cannot be replaced or
    made, or is being written by another run.
    """
    dst = Path(os.path.abspath(dst))
    _check_destination(dst)
    absent = [parent for parent in dst.parents if not parent.exists()]
    try:
        with _signals_as_interrupts(), _temporary_sibling(dst) as temporary:
            yield temporary
            os.replace(temporary, dst)
    except BaseException:
        with suppress(OSError):  # a parent that somebody else uses by now stays
            for parent in absent:
                parent.rmdir()
        raise


def check_output_file(path: str | os.PathLike) -> None:
    """Raises `UserError` unless a file can be written at `path`: its folder exists and is writable, and `path` is no folder."""
    path = Path(os.path.abspath(path))
    if path.is_dir():
        raise UserError(f"{path} is a directory: expected the name of a file to write.")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: {path.parent} is no existing directory.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: no permission.")


def _check_destination(dst: Path) -> None:
    """Raises `UserError` unless `dst` is free, or an empty directory that a new one can replace, and its parents can be made."""
    if dst.is_symlink():
        raise UserError(f"{dst} is a symbolic link: give the path it leads to, or remove it.")
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(
            f"{dst} already exists and is not an empty directory: remove it or choose another output path."
        )
    if os.path.ismount(dst):
        raise UserError(f"{dst} is a mount point, which no new directory can replace: choose a path inside it.")
    parent = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise UserError(f"{dst} cannot be made: {parent} is not a directory.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{dst} cannot be made: no permission to write in {parent}.")


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise `KeyboardInterrupt(signal)`, unless the process ignores or handles them already."""

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if in_main_thread and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _temporary_sibling(dst: Path) -> Iterator[Path]:
    """Yields the new directory .NAME.tmp beside `dst`, and removes it if it is still there in the end.

    The file .NAME.lock beside it is locked meanwhile. The system drops the lock with the process, however that ends, so a lock
    file that says so and is not locked makes the directory the leftover of a killed run. Raises `UserError`.
    """
    temporary, lock_file = dst.with_name(f".{dst.name}.tmp"), dst.with_name(f".{dst.name}.lock")
    lock = _lock(dst, lock_file)
    try:
        _check_destination(dst)  # another run may have finished since
        if os.path.lexists(temporary):
            if not os.read(lock, 1):
                raise UserError(f"{temporary} exists, and no run of this command made it: remove or rename it.")
            print(f"Removing {temporary}, left by a run that was killed", flush=True)
            shutil.rmtree(temporary)
        os.write(lock, b"A run of this project makes the directory .tmp beside this file.\n")
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        lock_file.unlink(missing_ok=True)
        os.close(lock)


def _lock(dst: Path, path: Path) -> int:
    """A descriptor of the file `path`, made if need be and locked until it is closed. Raises `UserError`."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UserError(f"{dst} cannot be made: {one_line(error)}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file between the two calls: then somebody else can lock another.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"Another run is writing {dst}: wait for it, or choose another output path.") from None
        except OSError as error:
            os.close(lock)
            raise UserError(f"{dst} cannot be made: {path} cannot be locked: {one_line(error)}") from error
        os.close(lock)


def read_json(path: str | os.PathLike) -> dict:
    """The object that a JSON file holds. Raises `UserError` when it holds anything else or cannot be read."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}: expected a JSON object.")
    return content


def _locate(source: str | os.PathLike) -> tuple[str, dict]:
    """Where `from_pretrained` finds `source`: its first argument and, for a GGUF file, the keyword argument that goes with it."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{source} does not exist: expected a GGUF file.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), {}
    try:
        validate_repo_id(str(source))
    except HFValidationError:
        raise UserError(f"{source} is neither a directory, nor a GGUF file, nor a Hub id such as org/name.") from None
    return str(source), {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Transformers from warning, in lines and tables, of what is refused here in one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_config(source: str | os.PathLike) -> PreTrainedConfig:
    """The configuration of the checkpoint `source`: a directory, a Hub id or a GGUF file. Raises `UserError`."""
    location, arguments = _locate(source)
    if not arguments:
        load_config_dict(source)
    try:
        with _quiet():
            return AutoConfig.from_pretrained(location, trust_remote_code=False, **arguments)
    # A damaged checkpoint fails in as many ways as there are readers: the type of the error says nothing more.
    except Exception as error:
        raise UserError(f"{source} has no usable configuration: {_reason(error)}") from error


def load_config_dict(source: str | os.PathLike) -> dict:
    """The entries of the config.json of `source`, a directory or a Hub id, of whatever model. Raises `UserError`."""
    location, _ = _locate(source)
    try:
        entries = read_json(cached_file(location, CONFIG_NAME))
    except Exception as error:
        raise UserError(f"{source} has no usable configuration: {_reason(error)}") from error
    if not isinstance(entries.get("auto_map", {}), dict):
        raise UserError(
            f"{source} has no usable configuration: auto_map is {entries['auto_map']!r}; expected an object."
        )
    return entries


def _optional_file(location: str, name: str) -> str | None:
    """Where the file `name` of a directory or Hub id lies on this machine; `None` when the checkpoint has none.

    Raises `UserError` for a link that leads nowhere and for a folder of that name, which Transformers takes for no file.
    """
    file = cached_file(location, name, _raise_exceptions_for_missing_entries=False)
    if file is None and os.path.lexists(os.path.join(location, name)):
        raise UserError(f"{os.path.join(location, name)} is no file, or a link to none.")
    return file


def load_generation_config(source: str | os.PathLike) -> GenerationConfig | None:
    """How `source`, a directory or a Hub id, says to generate; `None` when it has no file that says so.

    Raises `UserError` for a file that is there and cannot be read: Transformers would generate without it, with no word.
    """
    location, _ = _locate(source)
    try:
        file = _optional_file(location, GENERATION_CONFIG_NAME)
        return None if file is None else GenerationConfig.from_dict(read_json(file))
    except Exception as error:
        raise UserError(f"{source} has no usable {GENERATION_CONFIG_NAME}: {_reason(error)}") from error


def _check_index(location: str) -> None:
    """Raises `UserError` when an index of weight files is damaged or leads out of its directory."""
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (file := _optional_file(location, name)) is None:
            continue
        index = read_json(file)
        for field in ("metadata", "weight_map"):
            if not isinstance(index.get(field), dict):
                raise UserError(f"{name} has {field}={index.get(field)!r}: expected an object.")
        for tensor, shard in index["weight_map"].items():
            if not isinstance(shard, str) or Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise UserError(f"{name} looks for {tensor} in {shard!r}: expected a file of the same directory.")


def load_weights(source: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The tensors of `source`, a directory or a Hub id, on CPU, in one file or several: safetensors, else PyTorch's pickles, of
    which nothing but tensors is read. Raises `UserError`."""
    location, _ = _locate(source)
    try:
        _check_index(location)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            file = _optional_file(location, name)
            if file is not None:
                files = get_checkpoint_shard_files(location, file)[0] if name.endswith(".json") else [file]
                return {key: tensor for path in files for key, tensor in load_state_dict(path).items()}
    except Exception as error:
        raise UserError(f"The weights of {source} cannot be read: {_reason(error)}") from error
    raise UserError(
        f"{source} holds no weights: expected {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}, or the index of either."
    )


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], source: str | os.PathLike) -> None:
    """Raises `UserError`, naming the first, when a floating-point tensor of `source` holds NaN or infinity."""
    for name, tensor in tensors:
        # NaN is both the least and the largest value of what holds one.
        if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, tensor.detach().aminmax())):
            raise UserError(
                f"{name} of {source} holds NaN or infinity in {tensor.dtype}, whose largest number is "
                f"{torch.finfo(tensor.dtype).max:g}: the checkpoint is damaged or has diverged, or needs another dtype."
            )


def load_model(source: str | os.PathLike, dtype="auto") -> PreTrainedModel:
    """The causal language model in `source` (a directory, a Hub id or a GGUF file) on CPU, in eval mode; a GGUF file is
    dequantised.

    Args:
        dtype (`str` or `torch.dtype`): of the weights; "auto" keeps the checkpoint's.

    Raises `UserError` when the weights do not load, do not fill the model exactly (Transformers only warns then) or are not
    finite in that dtype, and when there is a generation config that cannot be read.
    """
    location, arguments = _locate(source)
    if "gguf_file" in arguments:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    else:
        load_config_dict(source)
        load_generation_config(source)
    try:
        if not arguments:
            _check_index(location)
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                location,
                trust_remote_code=False,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **arguments,
            )
    except Exception as error:
        raise UserError(f"{source} cannot be loaded: {_reason(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[problem]:
            names = sorted(str(name) for name in info[problem])
            raise UserError(
                f"{source} does not hold the weights its config asks for: {problem.replace('_', ' ')} "
                f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}."
            )
    check_finite(model.named_parameters(), source)
    return model


def load_tokenizer(source: str | os.PathLike, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer in `source` (a directory, a Hub id or a GGUF file).

    Raises `UserError` when there is none, or when one of its ids has no row in an embedding of `vocab_size` rows.
    """
    location, arguments = _locate(source)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False, **arguments)
        token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    except Exception as error:
        raise UserError(f"{source} has no usable tokenizer: {_reason(error)}") from error
    if highest < 0:
        raise UserError(f"{source} has no usable tokenizer: its vocabulary is empty.")
    if highest >= vocab_size:
        raise UserError(
            f"The tokenizer in {source} does not fit the model: its token {token!r} has the id {highest}, and the embedding "
            f"has {vocab_size} rows."
        )
    return tokenizer


# What a clean process runs first. The path finder blocks this package even where it is installed in the same environment,
# because a process in which the Auto classes know "iha" would never execute the code shipped with the checkpoint.
_BLOCK_PACKAGE = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "modeling_iha":
            raise ModuleNotFoundError("modeling_iha is blocked in this process", name=name)

sys.meta_path.insert(0, Blocker())
try:
    import modeling_iha
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("modeling_iha could be imported: this process proves nothing")

request = json.load(sys.stdin)
"""

_LOAD_AND_GENERATE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model, info = AutoModelForCausalLM.from_pretrained(
    request["directory"], trust_remote_code=True, dtype="auto", output_loading_info=True
)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
    if info[kind]:
        raise SystemExit(f"{kind}: {sorted(map(str, info[kind]))[:3]}")
tokenizer = AutoTokenizer.from_pretrained(request["directory"], trust_remote_code=True)
result = {
    "model_class": type(model).__name__,
    "module": type(model).__module__,
    "parameters": model.num_parameters(),
    "vocabulary": len(tokenizer),
}
prompt = request["prompt"]
if prompt is not None:
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    inputs.pop("token_type_ids", None)
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=request["max_new_tokens"], do_sample=False)
    result["token_ids"] = output[0, inputs["input_ids"].shape[1] :].tolist()
    result["text"] = tokenizer.decode(result["token_ids"], skip_special_tokens=True)
"""


def run_in_clean_process(program: str, request: dict, offline: bool = True) -> dict:
    """Run Python code in a fresh isolated process that cannot import `modeling_iha`, with empty Hugging Face caches, no token and,
    when `offline`, no Hub. It finds `request` under that name and leaves its answer, which must fit into JSON, in `result`.

    Raises `UserError` with the last line the process wrote when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="clean-process-") as empty:
        isolated = {
            "HF_HOME": empty,
            "HF_MODULES_CACHE": os.path.join(empty, "modules"),
            "HF_HUB_OFFLINE": str(int(offline)),
        }
        caches = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN")
        process = subprocess.run(
            [sys.executable, "-I", "-c", f"{_BLOCK_PACKAGE}{program}\nprint()\nprint(json.dumps(result))"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            cwd=empty,
            env={key: value for key, value in os.environ.items() if key not in caches} | isolated,
        )
    if process.returncode != 0:
        raise UserError((process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1].strip())
    return json.loads(process.stdout.strip().splitlines()[-1])


def load_in_clean_process(
    directory: str | os.PathLike, prompt: str | list[dict] | None = None, max_new_tokens: int = 64
) -> dict:
    """Load a saved model directory in a fresh isolated process that cannot import `modeling_iha`, and generate.

    The process has empty Hugging Face caches and no network; it loads the model with `trust_remote_code=True`, refuses
    missing, unexpected or mismatched weights, and loads the tokenizer. With a `prompt` (text, or a list of chat messages
    for the chat template) it decodes greedily.

    Returns a dict with "model_class", "module", "parameters", "vocabulary" and, with a prompt, "token_ids" (the new
    tokens only) and "text". Raises `UserError` with the last line the process wrote when it fails.
    """
    directory = Path(directory).resolve()
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} holds no config.json: expected a saved model directory.")
    request = {"directory": str(directory), "prompt": prompt, "max_new_tokens": max_new_tokens}
    try:
        return run_in_clean_process(_LOAD_AND_GENERATE, request)
    except UserError as error:
        raise UserError(f"{directory} does not load in a clean process: {error}") from None
