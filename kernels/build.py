"""Write the builds of the kernels that `kernels.get_local_kernel` and the Hub read, from the file of the checkpoints.

example: python kernels/build.py outputs/iha-kernels
"""

import hashlib
import json
import shutil
import sys
import tomllib
from pathlib import Path


HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "modeling_iha" / "triton_kernels.py"
# A kernel of the Hub imports PyTorch, Triton and the standard library only.
REPLACED = {
    "from transformers.utils import logging\n": "import logging\n",
    "logging.get_logger(": "logging.getLogger(",
}


def build(target: Path) -> None:
    """Write build.toml, the card, and a directory for each backend. Raise a ValueError for an unknown source."""
    code = SOURCE.read_text(encoding="utf-8")
    for old, new in REPLACED.items():
        if code.count(old) != 1:
            raise ValueError(f"{SOURCE.name} no longer has {old!r} once: change REPLACED.")
        code = code.replace(old, new)
    general = tomllib.loads((HERE / "build.toml").read_text(encoding="utf-8"))["general"]
    package = HERE / "torch-ext" / general["name"].replace("-", "_")
    for backend in general["backends"]:
        variant = target / "build" / f"torch-{backend}"
        shutil.copytree(package, variant, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        (variant / SOURCE.name).write_text(code, encoding="utf-8")
        facts = {name: general[name] for name in ("name", "version", "license")}
        unique = f"_{package.name}_{backend}_{hashlib.sha256(code.encode()).hexdigest()[:7]}"
        facts |= {"id": unique, "python-depends": [], "backend": {"type": backend}}
        (variant / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name in ("README.md", "build.toml"):
        shutil.copy(HERE / name, target / name)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
