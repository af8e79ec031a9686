"""Check a release. `make release-check` runs this in an environment that has nothing of the checkout but its wheel.

`address` looks for the placeholder in setup.py, `package` runs what needs no extra, and `extras` what needs the extras
"serve" and "scripts". The model is a small random one of SmolLM2's name, so nothing is downloaded.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import files, version
from pathlib import Path
from urllib.error import URLError


CHECKOUT = Path(__file__).resolve().parents[1]
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"  # in README's first block
PROGRAMS = Path(sys.executable).parent
SECONDS = 300


def check_address(tag: str | None) -> None:
    """Raise SystemExit if a page lacks the repository's address, or for a tag of another version."""
    setup = (CHECKOUT / "setup.py").read_text(encoding="utf-8")
    address = re.search(r'^REPOSITORY = "(.+)"', setup, re.MULTILINE)[1]
    if "/OWNER/" in address and os.environ.get("PLACEHOLDER") != "allowed":
        raise SystemExit(
            f"Error: REPOSITORY in setup.py is the placeholder {address}: write the address of the repository there, "
            "or run `make release-check PLACEHOLDER=allowed` to check everything else."
        )
    notebook = (CHECKOUT / "examples" / "interleaved_heads.ipynb").read_text(encoding="utf-8")
    if f'pip install -q git+{address}"' not in notebook:
        raise SystemExit(
            f"Error: examples/interleaved_heads.ipynb does not install from {address}: write that address."
        )
    if f"git clone {address}\n" not in (CHECKOUT / "README.md").read_text(encoding="utf-8"):
        raise SystemExit(f"Error: README.md does not clone {address}, the REPOSITORY in setup.py: write it there too.")
    package = (CHECKOUT / "modeling_iha" / "__init__.py").read_text(encoding="utf-8")
    number = re.search(r'^__version__ = "(.+?)"', package, re.MULTILINE)[1]
    if tag and tag != f"v{number}":
        raise SystemExit(f"Error: the tag is {tag}, and __version__ in modeling_iha is {number}: make them agree.")


def run(*words: str, fails: bool = False) -> str:
    """Run a program of this environment and return what it printed. Stop if it fails, or if it should and does not."""
    print("$", " ".join(words) if words[0] != "python" else "python (a block of README.md)", flush=True)
    begun = time.monotonic()
    command = [str(PROGRAMS / words[0]), *words[1:]]
    process = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
    if (process.returncode != 0) != fails:
        raise SystemExit(f"{process.stdout}\nError: {words[0]} ended with {process.returncode}.")
    print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    return process.stdout


def save_source() -> None:
    """Save a random Llama whose tokens are bytes, under the name of the model in README.md."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=pieces[0], pad_token=pieces[0]).save_pretrained(
        SOURCE
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,  # with 0.02 the broken control of `iha verify` would hardly differ
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(SOURCE)


def check_package() -> None:
    """Run README's first two blocks and the commands of the wheel that need no extra."""
    save_source()
    [license_file] = [file for file in files("modeling-iha") if file.name == "LICENSE"]
    shutil.copy(license_file.locate(), "LICENSE")  # the text of the second block
    blocks = re.findall(r"^```python\n(.*?)^```", (CHECKOUT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    for block in blocks[:2]:
        run("python", "-c", block)
    for directory in ("smollm2-interleaved", "first-run/checkpoint-20"):
        assert list(Path(directory).glob("*.safetensors")) and list(Path(directory).glob("modeling_*.py")), directory
    run("iha", "convert", SOURCE, "smollm2-iha", "--num-pseudo-heads", "2")
    assert "The conversion is exact up to rounding." in run("iha", "verify", SOURCE, "smollm2-iha")
    assert "FLOPs" in run("iha", "cost", "--config", "smollm2-iha", "--tokens", "128")
    words = ["smollm2-iha", "me/smollm2-iha", "--license", "apache-2.0", "--base-model", SOURCE, "--dry-run"]
    assert "Would upload to me/smollm2-iha" in run("iha", "push", *words)
    said = run("iha", "serve", "smollm2-iha", fails=True)
    assert 'run pip install "modeling-iha[serve]".' in said and said.count("\n") == 1, said


def check_extras() -> None:
    """Train the converted model by TRL's own command, and serve the result."""
    Path("rows").mkdir()
    rows = [{"text": f"{number} and {number} are {2 * number}."} for number in range(32)]
    Path("rows", "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run(
        *("trl", "sft", "--model_name_or_path", "smollm2-iha", "--trust_remote_code", "--dataset_name", "rows"),
        *("--output_dir", "tuned", "--max_steps", "4", "--bf16", "false", "--use_cpu"),
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [PROGRAMS / "iha", "serve", "tuned", "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    print("$ iha serve tuned", flush=True)
    with open("server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        text = answer(f"http://127.0.0.1:{port}", server)
    finally:
        server.terminate()
        server.wait(60)
    print(f"  answered {text!r}")


def answer(address: str, server: subprocess.Popen) -> str:
    """Return what a server answers to one request, as soon as it is up."""
    begun = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except (OSError, URLError):
            if server.poll() is not None or time.monotonic() - begun > SECONDS:
                raise SystemExit(f"{Path('server.log').read_text()}\nError: iha serve does not answer.") from None
            time.sleep(0.5)
    data = json.dumps({"model": "tuned", "prompt": "3 and 3 are", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        said = json.load(reply)
    assert said["usage"]["completion_tokens"] > 0, said
    return said["choices"][0]["text"]


if __name__ == "__main__":
    stage, place = sys.argv[1:]
    if stage == "address":
        check_address(place)
    else:
        import modeling_iha

        assert Path(modeling_iha.__file__).is_relative_to(sys.prefix), modeling_iha.__file__
        print(f"modeling-iha {version('modeling-iha')}: {stage}")
        os.chdir(place)
        {"package": check_package, "extras": check_extras}[stage]()
