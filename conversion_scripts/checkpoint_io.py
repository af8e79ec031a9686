"""Reading and writing checkpoints the same way in every command.

Errors the user can fix are `UserError`s, an output appears whole or not at all, a checkpoint that does not load without
loss is refused, and a saved directory can be proven to stand on its own in a process that has never seen this package.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
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
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # safetensors and tokenizers wrap the system's error in exception types of their own, and keep Rust's wording.
        if not isinstance(error, (UserError, OSError)) and "(os error " not in str(error):
            raise
        print(f"Error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)


def one_line(error: Exception) -> str:
    """The message of `error` with its line breaks removed, or its class name when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def new_directory(dst: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary sibling of `dst` to write into; it becomes `dst` on success and is removed on any exception.

    Raises `UserError` when `dst` exists and is anything but an empty directory.
    """
    dst = Path(os.path.abspath(dst))
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(
            f"{dst} already exists and is not an empty directory: remove it or choose another output path."
        )
    dst.parent.mkdir(parents=True, exist_ok=True)
    temporary = dst.parent / f".{dst.name}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, dst)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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


def load_config(source: str | os.PathLike) -> PreTrainedConfig:
    """The configuration of the checkpoint `source`: a directory, a Hub id or a GGUF file. Raises `UserError`."""
    location, arguments = _locate(source)
    try:
        return AutoConfig.from_pretrained(location, trust_remote_code=False, **arguments)
    # A damaged checkpoint fails in as many ways as there are readers: the type of the error says nothing more.
    except Exception as error:
        raise UserError(f"{source} has no usable configuration: {one_line(error)}") from error


def load_config_dict(source: str | os.PathLike) -> dict:
    """The entries of the config.json of `source`, a directory or a Hub id, of whatever model. Raises `UserError`."""
    location, _ = _locate(source)
    try:
        return json.loads(Path(cached_file(location, "config.json")).read_text(encoding="utf-8"))
    except Exception as error:
        raise UserError(f"{source} has no usable configuration: {one_line(error)}") from error


def load_weights(source: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The tensors of `source`, a directory or a Hub id, on CPU, in one file or several: safetensors, else PyTorch's pickles, of
    which nothing but tensors is read. Raises `UserError`."""
    location, _ = _locate(source)
    try:
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            file = cached_file(location, name, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                files = get_checkpoint_shard_files(location, file)[0] if name.endswith(".json") else [file]
                return {key: tensor for path in files for key, tensor in load_state_dict(path).items()}
    except Exception as error:
        raise UserError(f"The weights of {source} cannot be read: {one_line(error)}") from error
    raise UserError(
        f"{source} holds no weights: expected {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}, or the index of either."
    )


def load_model(source: str | os.PathLike, dtype="auto") -> PreTrainedModel:
    """The causal language model in `source` (a directory, a Hub id or a GGUF file) on CPU, in eval mode; a GGUF file is
    dequantised.

    Args:
        dtype (`str` or `torch.dtype`): of the weights; "auto" keeps the checkpoint's.

    Raises `UserError` when the weights do not load, or do not fill the model exactly (Transformers only warns then).
    """
    location, arguments = _locate(source)
    if "gguf_file" in arguments:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Transformers would only warn, with a table, of what is refused below
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            location,
            trust_remote_code=False,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
        )
    except Exception as error:
        raise UserError(f"{source} cannot be loaded: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[problem]:
            names = sorted(str(name) for name in info[problem])
            raise UserError(
                f"{source} does not hold the weights its config asks for: {problem.replace('_', ' ')} "
                f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}."
            )
    return model


def load_tokenizer(source: str | os.PathLike, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer in `source` (a directory, a Hub id or a GGUF file).

    Raises `UserError` when there is none, or when one of its ids has no row in an embedding of `vocab_size` rows.
    """
    location, arguments = _locate(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False, **arguments)
    except Exception as error:
        raise UserError(f"{source} has no usable tokenizer: {one_line(error)}") from error
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
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
