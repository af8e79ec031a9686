"""Find each mistake that Transformers' loader of remote code passes over, and leave alone what is right."""

import json
import sys

import pytest
from helpers import last_line

from common.command_io import ROOT
from conversion_scripts import check_remote_code
from modeling_iha.configuration_iha import AUTO_MAP


GOOD = {
    "configuration_toy.py": "import math\n\nclass ToyConfig:\n    pass\n",
    "modeling_toy.py": '''\
"""A toy. Files import from .helper with one import a line."""

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

from .configuration_toy import ToyConfig
from .helper import (
    one,
    two,
)


class ToyModel:
    def method(self):
        import json
        return importlib.import_module("json")
''',
    "helper.py": "one = 1\ntwo = 2\n",
}
AUTO = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}


def write(directory, files, auto_map=AUTO):
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    if auto_map is not None:
        (directory / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    return directory


def insert(line):
    """Return the good files, with this line instead of the import of the helper."""
    text = GOOD["modeling_toy.py"].replace("from .helper import (\n    one,\n    two,\n)", line)
    assert text != GOOD["modeling_toy.py"]
    return {**GOOD, "modeling_toy.py": text}


def test_our_own_code_has_no_mistake():
    assert check_remote_code.check_remote_code(ROOT / "modeling_iha") == []
    for reference in AUTO_MAP.values():
        assert (ROOT / "modeling_iha" / f"{reference.split('.')[0]}.py").is_file()


@pytest.mark.parametrize("auto_map", [AUTO, None])
def test_good_code_has_no_mistake(auto_map, tmp_path):
    assert check_remote_code.check_remote_code(write(tmp_path, GOOD, auto_map)) == []


MISTAKES = {
    "a sub-package": ("from .sub.helper import one", ".sub.helper is not beside this file"),
    "the parent": ("from ..helper import one", "..helper is not beside this file"),
    "a module by name": ("from . import helper", "`from . import` is not followed"),
    "importlib": ('importlib.import_module(".helper", __package__)', "importlib with a relative name"),
    "importlib, computed": ('importlib.import_module(f".{name}")', "importlib with a relative name"),
    "import_module": ("import_module(name, package=__package__)", "importlib with a relative name"),
    "two on a line": ("import math; from .helper import one", "import of .helper is not followed"),
    "a broken line": ("from \\\n    .helper import one", "import of .helper is not followed"),
    "a docstring": ('"""\nfrom .nothing import x\n"""', "taken for an import of .nothing"),
    "the own package": ("from toy.helper import one", "absolute import of toy"),
    "a sibling": ("import helper", "absolute import of helper"),
    "an optional package": ("import triton", "triton may not be installed"),
    "a missing file": ("from .lost import one", "lost.py: needed by auto_map or an import, and missing"),
    "no Python": ("from .helper import", "modeling_toy.py:14"),
}


@pytest.mark.parametrize("line, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(line, message, tmp_path):
    """Find it once, with its line, in a package and in a checkpoint that its auto_map leads into."""
    directory = write(tmp_path / "toy", insert(line), auto_map=None)
    (problem,) = check_remote_code.check_remote_code(directory)
    assert message in problem and (problem.startswith("modeling_toy.py:1") or "missing" in problem)
    if "toy.helper" not in line:  # a checkpoint's directory has any name
        assert check_remote_code.check_remote_code(write(tmp_path / "any", insert(line))) == [problem]


def test_mistakes_of_helpers_are_found_and_of_files_that_do_not_ship_are_not(tmp_path):
    directory = write(
        tmp_path, {**GOOD, "helper.py": "import flash_attn\n", "train.py": "import wandb\nfrom . import x\n"}
    )
    (problem,) = check_remote_code.check_remote_code(directory)
    assert problem.startswith("helper.py:1:") and "flash_attn" in problem


@pytest.mark.parametrize(
    "reference, message",
    [
        ("modeling_gone.ToyModel", "modeling_gone.py: needed by auto_map"),
        ("modeling_toy._fsdp_ToyModel", "expects the class _fsdp_ToyModel"),
        ("other/repo--modeling_toy.ToyModel", "points at another repository"),
    ],
)
def test_auto_map_names_what_is_there(reference, message, tmp_path):
    directory = write(tmp_path, GOOD, {**AUTO, "AutoModelForCausalLM": reference})
    (problem,) = check_remote_code.check_remote_code(directory)
    assert message in problem


def test_command(tmp_path, cli):
    code, out, _ = cli(check_remote_code, ROOT / "modeling_iha")
    assert code == 0 and "no mistakes found" in out
    write(tmp_path / "toy", insert("from . import helper"))
    code, out, err = cli(check_remote_code, tmp_path / "toy")
    assert code == 1 and "modeling_toy.py:14: `from . import`" in out and "mistakes found: 1" in last_line(err)
    code, _, err = cli(check_remote_code, tmp_path)
    assert code == 1 and "holds no Python files" in last_line(err)
    assert "modeling_toy" not in sys.modules
