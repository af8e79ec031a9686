"""Run a checkpoint's own code in a process that cannot import this package."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from iha.errors import UserError


# The start of the program of a clean process. The finder blocks this package even if it is installed: a process in
# which the Auto classes know "iha" would never execute the code that ships with the checkpoint.
_BLOCK_PACKAGE = """
import gc, json, sys

gc.disable()  # imports leave no garbage, and a collection walks through all that they make

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
import gc
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gc.enable()  # a cycle would keep weights in memory
model, info = AutoModelForCausalLM.from_pretrained(
    request["source"], trust_remote_code=True, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
    if info[kind]:
        raise SystemExit(f"{kind}: {sorted(map(str, info[kind]))[:3]}")
for name, tensor in model.state_dict().items():  # the buffers of the mixing hold its start
    if tensor.is_floating_point() and not tensor.float().isfinite().all():
        raise SystemExit(f"{name} holds NaN or infinity in {tensor.dtype}")
tokenizer = AutoTokenizer.from_pretrained(request["source"], trust_remote_code=True)
result = {
    "model_class": type(model).__name__,
    "module": type(model).__module__,
    "parameters": model.num_parameters(),
    "vocabulary": len(tokenizer),
}
prompt = request["prompt"]
if prompt is not None:
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=isinstance(request["prompt"], str))
    inputs.pop("token_type_ids", None)
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=request["max_new_tokens"], do_sample=False)
    result["token_ids"] = output[0, inputs["input_ids"].shape[1] :].tolist()
    result["text"] = tokenizer.decode(result["token_ids"], skip_special_tokens=True)
"""


# All that a clean process sees of the user's environment, which may hold tokens and keys: where programs and libraries
# lie, the language, the devices and, for a process that may use it, the network.
_ENVIRONMENT = (
    *("PATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "ROCR_VISIBLE_DEVICES"),
)
_NETWORK = ("HF_ENDPOINT", "HF_HUB_DISABLE_XET", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE")


def run_in_clean_process(program: str, request: dict, offline: bool = True) -> dict:
    """Run Python code in a new isolated process that cannot import `modeling_iha`, and return its answer.

    Its home is empty, and so are the caches of Hugging Face. It gets only the harmless part of the user's environment,
    no token and, if `offline`, no Hub. The code reads the variable `request` and assigns its answer, which must be
    serialisable as JSON, to the variable `result`.

    This keeps secrets of the environment from the code, but it is no sandbox. If the process fails, raise `UserError`
    with the last line that the process wrote.
    """
    with tempfile.TemporaryDirectory(prefix="clean-process-") as empty:
        isolated = {
            "HOME": empty,
            "HF_HOME": empty,
            "HF_HUB_CACHE": os.path.join(empty, "hub"),
            "HF_MODULES_CACHE": os.path.join(empty, "modules"),
            "HF_HUB_OFFLINE": str(int(offline)),
        }
        names = _ENVIRONMENT if offline else _ENVIRONMENT + _NETWORK
        found = f"import sys\nsys.path += [path for path in {library_paths()!r} if path not in sys.path]\n"
        process = _start(
            f"{found}{_BLOCK_PACKAGE}{program}\nprint()\nprint(json.dumps(result))",
            json.dumps(request),
            empty,
            {name: os.environ[name] for name in names if name in os.environ} | isolated,
        )
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise UserError(f"the process was ended by {name}: is there enough memory?")
    if process.returncode != 0:
        # After an exception nanobind (of Triton 3.9, for example) lists objects that are still in use as leaks.
        lines = process.stderr.partition("nanobind: leaked")[0].strip().splitlines()
        raise UserError((lines or [f"exit code {process.returncode}"])[-1].strip())
    return json.loads(process.stdout.strip().splitlines()[-1])


def library_paths() -> list[str]:
    """Return where this process finds libraries. An isolated one looks at neither PYTHONPATH nor a user's own.

    A folder that `pip install --target` made may have any name, so those of PyTorch and Transformers count too. Other
    folders do not: one of them may be the cache of remote code that this process has loaded."""
    found = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    for name in ("torch", "transformers"):
        folder = str(Path(find_spec(name).origin).parents[1])
        if folder not in found:
            found.append(folder)
    return found


def _start(program: str, given: str, directory: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run an isolated Python on a program, with text on its standard input, and wait for it."""
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=directory, env=environment)


def load_in_clean_process(
    source: str | os.PathLike,
    prompt: str | list[dict] | None = None,
    max_new_tokens: int = 64,
) -> dict:
    """Load a saved model in a new isolated process that cannot import `modeling_iha`, and generate.

    The process has no Hub. It loads the model with `trust_remote_code=True`, rejects weights that are not finite or do
    not fill the model exactly, and loads the tokenizer. With a `prompt` (text, or a list of chat messages for the chat
    template) it decodes greedily.

    Return a dict with "model_class", "module", "parameters", "vocabulary" and, with a prompt, "token_ids" (the new
    tokens only) and "text". If the process fails, raise `UserError` with the last line that the process wrote.
    """
    source = Path(source).resolve()
    request = {"source": str(source), "prompt": prompt, "max_new_tokens": max_new_tokens}
    try:
        return run_in_clean_process(_LOAD_AND_GENERATE, request)
    except UserError as error:
        raise UserError(f"{source} does not load in a clean process: {error}") from None
