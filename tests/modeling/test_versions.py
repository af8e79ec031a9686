"""Run on every supported Transformers, whatever it calls a cache, and reject the others by name.

The error comes before the package imports anything that another version might lack.
"""

import importlib.metadata
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import WAYS, assert_close, greedy, random_ids, uncached_logits
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from iha.errors import ROOT
from iha.processes import run_in_clean_process
from modeling_iha.transformers_versions import CACHE, FIRST_UNTESTED, OLDEST


@pytest.fixture
def import_with(monkeypatch):
    """Return a function that runs a module and the check that it imports, with another version of Transformers."""
    installed = importlib.metadata.version

    def import_with(version, module="configuration_iha"):
        # The check reads the version of the installed distribution; everything else stays what it is.
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: version if name == "transformers" else installed(name)
        )
        monkeypatch.delitem(sys.modules, "modeling_iha.transformers_versions")
        return runpy.run_module(f"modeling_iha.{module}")

    return import_with


@pytest.mark.parametrize("module", ["configuration_iha", "modeling_interleaved"])
@pytest.mark.parametrize("version", ["5.16.4", "6.0.0"])
def test_an_unsupported_version_is_refused(version, module, import_with, monkeypatch):
    """Reject it before an import that it might lack."""
    later = ("transformers.modeling_rope_utils", "transformers.models.llama.configuration_llama")
    for name in (*later, "huggingface_hub.dataclasses"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"transformers>=5.17,<6 is required .* found transformers=={version}"):
        import_with(version, module)


@pytest.fixture
def warned(monkeypatch):
    """Return a list of the warnings that Transformers' logger is given."""
    seen = []
    logging.warning_once.cache_clear()  # of earlier tests
    monkeypatch.setattr(logging.get_logger(), "warning", seen.append)
    return seen


@pytest.mark.parametrize("version", [OLDEST, "5.24.3", f"{FIRST_UNTESTED}.0.dev0"])
def test_a_supported_version_is_taken(version, import_with, warned):
    assert import_with(version)["IHAConfig"].model_type == "iha"
    assert not warned


@pytest.mark.parametrize("module", ["configuration_iha", "modeling_interleaved"])
def test_a_version_newer_than_the_tests_is_taken_with_a_warning(module, import_with, warned):
    """Let a checkpoint run on later minor versions; pip installs none of them next to the package."""
    import_with("5.99.0", module)
    [warning] = warned
    assert re.search(r"before 5\.25, and 5\.99\.0 is installed: .* \"transformers<5\.25\"", warning)


def test_the_package_and_a_checkpoint_warn_once_in_all(tmp_path, import_with, warned):
    WAYS["iha"]().save_pretrained(tmp_path)
    import_with("5.99.0")
    model = get_class_from_dynamic_module("modeling_iha.IHAForCausalLM", str(tmp_path))
    assert model.__module__.startswith("transformers_modules.") and len(warned) == 1


# Two names of a cache


MODELS = {way: WAYS[way] for way in ("iha", "interleaved")}


@pytest.mark.parametrize("part", ["model", "decoder"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("way", MODELS)
def test_a_cache_is_taken_by_either_name_and_given_back(way, name, part):
    """Scripts that were written for one version run on the others."""
    model, input_ids = MODELS[way](), random_ids(2, 9)
    called = model if part == "model" else model.model
    with torch.no_grad():
        expected = called(input_ids, use_cache=False)[0][:, 6:]
        cache = DynamicCache(config=model.config)
        prompt = called(input_ids[:, :6], **{name: cache})
        assert prompt[CACHE] is cache and cache.get_seq_length() == 6
        assert_close(called(input_ids[:, 6:], **{name: cache})[0], expected)
        assert cache.get_seq_length() == 9


# Other versions


# Builds a model of each way where the package is at hand, and saves it with the tokens that it generates.
SAVE = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests", sys.argv[1] + "/tests/modeling"]
import torch
from pathlib import Path
from test_versions import save_models
save_models(Path(sys.argv[2]))
"""
# Where it is not, generates from a dynamic cache, a static one and none.
LOAD = """
import torch, transformers
from transformers import AutoModelForCausalLM
result = {"version": transformers.__version__, "tokens": {}}
for way, tokens in request["prompts"].items():
    place = request["directory"] + "/" + way
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = torch.tensor(tokens)
    caches = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}
    result["tokens"][way] = {
        name: model.generate(tokens, **options, **chosen).tolist() for name, chosen in caches.items()
    }
"""
PROMPT = random_ids(2, 9)


def save_models(directory):
    """Save a model of each way, and what each continues the prompt by, computed without a cache."""
    continued = {}
    for way, make in MODELS.items():
        model = make()
        model.save_pretrained(directory / way)
        continued[way] = greedy(model, PROMPT, 8).tolist()
    (directory / "continued.json").write_text(json.dumps(continued))


def versions_beside():
    """Return the Python of each environment that the Makefile has set up, besides the one that runs the tests."""
    found = [path.with_name("bin") / "python" for path in sorted(ROOT.glob(".venv*/installed"))]
    return [python for python in found if python.parent.parent.resolve() != Path(sys.prefix).resolve()]


@pytest.mark.slow  # `make test-oldest` runs it
@pytest.mark.parametrize("saved_here", [True, False], ids=["saved_here", "loaded_here"])
def test_a_checkpoint_runs_on_the_other_versions(saved_here, tmp_path, monkeypatch):
    """Save with one version of Transformers, and load in a process of another that cannot import the package."""
    if not (others := versions_beside()):
        pytest.skip("no environment with another version of Transformers is set up: make test-oldest")
    for other in others:
        directory = tmp_path / other.parent.parent.name
        directory.mkdir()
        if saved_here:
            save_models(directory)
            monkeypatch.setattr(sys, "executable", str(other))
        else:
            subprocess.run([other, "-c", SAVE, ROOT, directory], check=True, capture_output=True)
        continued = json.loads((directory / "continued.json").read_text())
        prompts = dict.fromkeys(continued, PROMPT.tolist())
        answer = run_in_clean_process(LOAD, {"directory": str(directory), "prompts": prompts})
        monkeypatch.undo()
        for way, tokens in continued.items():
            assert answer["tokens"][way] == dict.fromkeys(("dynamic", "static", "none"), tokens), (other, answer)


# The line of docs/CHECKPOINTS.md that gives a saved directory the code of the installed package.
def test_a_directory_with_old_code_gets_that_of_the_package(tmp_path, monkeypatch):
    """Run the line's program in this process, which spares the imports."""
    save_models(tmp_path)
    [line] = [
        line for line in (ROOT / "docs/CHECKPOINTS.md").read_text().splitlines() if line.startswith("python -c ")
    ]
    for way, expected in json.loads((tmp_path / "continued.json").read_text()).items():
        shipped = {path.name: path.read_bytes() for path in (tmp_path / way).glob("*.py")}
        weights = (tmp_path / way / "model.safetensors").read_bytes()
        for name in shipped:
            (tmp_path / way / name).write_text("raise RuntimeError('old code')\n")
        (tmp_path / way / "transformers_versions.py").unlink()
        *python, program, directory = shlex.split(line)
        assert (python, directory) == (["python", "-c"], "DIR")
        monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / way)])
        exec(program, {})
        assert {path.name: path.read_bytes() for path in (tmp_path / way).glob("*.py")} == shipped
        assert (tmp_path / way / "model.safetensors").read_bytes() == weights
        model = AutoModelForCausalLM.from_pretrained(tmp_path / way)
        assert uncached_logits(model, PROMPT).isfinite().all()
