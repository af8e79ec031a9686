"""`transformers serve` for IHA checkpoints, with all its options: an OpenAI-compatible server.

The server looks the class of a checkpoint up among the names of `transformers` itself, whatever `--trust-remote-code` says, so the
command alone cannot find one that is not part of the library. It runs the installed package, not the code in the checkpoint.

example: python conversion_scripts/serve.py smollm2-iha --port 8000
"""

import sys
from pathlib import Path

import transformers
from transformers.cli.transformers import main


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_iha import IHAForCausalLM  # noqa: E402


if __name__ == "__main__":
    transformers.IHAForCausalLM = IHAForCausalLM
    sys.argv.insert(1, "serve")
    main()
