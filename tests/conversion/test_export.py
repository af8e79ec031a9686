"""Decode with an export what the model decodes, in every format, and keep no export that differs."""

import importlib.util
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from helpers import GEOMETRIES, OTHER_KINDS, last_line, random_ids, random_model, small_config
from tiny_sources import VOCAB_SIZE, tiny_source, tiny_tokenizer
from transformers import exporters

from conversion_scripts import export, run_exported
from conversion_scripts.verify_conversion import break_one_parameter
from modeling_iha import interleave_heads
from modeling_iha.mixing import mixing_parameters


pytestmark = pytest.mark.skipif(
    not hasattr(exporters, "ExportedModel"), reason="this version of Transformers has no exporters that save"
)
# A window, so that the mask decides what a layer sees of the cache.
WINDOW = {"layer_types": "sliding_attention", "sliding_window": 3, "num_hidden_layers": 1}
LAYERS = {
    "iha": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "iha, all heads": {**WINDOW, "pseudo_positions": "shared", "pseudo_collapse": "all_heads"},
    **{name: {**GEOMETRIES[name], **WINDOW} for name in OTHER_KINDS if name != "hyper_linear"},
    "hyper, linear": {**GEOMETRIES["hyper_linear"], "num_hidden_layers": 1},
}
PROMPT = "the people of the world"
# The others are made of the graphs that dynamo traces.
FORMATS = ["dynamo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("onnx", "openvino"))]


def prompts(*lengths):
    return [random_ids(length, seed=length).tolist() for length in lengths]


def needs(export_format):
    """Skip where the packages of a format are not installed."""
    missing = [name for name in export.FORMATS[export_format].packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[export]'")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save a model of one window layer of kind "iha", and return it with its directory."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model = random_model(small_config(**WINDOW, vocab_size=VOCAB_SIZE))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    """Return a function that exports the checkpoint by the command, once to a format, and returns where."""

    @cache
    def exported(export_format):
        needs(export_format)
        out = tmp_path_factory.mktemp(export_format) / "exported"
        arguments = ["export", checkpoint[1], out, "--format", export_format, "--try", PROMPT]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
            patch.setattr(sys, "argv", [*map(str, arguments)])
            export.main()
        assert "32 of 32 greedy tokens are the model's" in printed.getvalue()
        assert [path.name for path in out.parent.iterdir()] == ["exported"]
        return out

    return exported


@pytest.fixture(scope="module")
def loaded(exported):
    """Return a function that loads the export to a format, once."""
    return cache(lambda export_format: run_exported.load(exported(export_format)))


@pytest.mark.parametrize("export_format", FORMATS)
def test_an_export_decodes_what_the_model_does(checkpoint, exported, loaded, export_format, capfd):
    model, out = checkpoint[0], exported(export_format)
    readme = (out / "README.md").read_text(encoding="utf-8")
    assert f"run_exported.py . '{PROMPT}'" in readme and str(out.parent) not in readme

    runners = loaded(export_format)
    assert "Traceback" not in capfd.readouterr().err
    assert export_format != "openvino" or "openvino.tools.ovc.telemetry_stub" in sys.modules
    # One row and three, shorter and longer than the prompts that were traced.
    for lengths in [(9, 5), (1,), (20, 3, 11), (70,)]:
        assert export.verify(model, runners, prompts(*lengths), 12).passed
    break_one_parameter(model)
    assert not export.verify(model, runners, prompts(9, 5), 12).passed
    break_one_parameter(model)  # the sign is back


@pytest.mark.slow
@pytest.mark.parametrize("export_format", export.FORMATS)
@pytest.mark.parametrize("layers", LAYERS)
def test_every_kind_exports(layers, export_format, tmp_path):
    needs(export_format)
    model = random_model(small_config(**LAYERS[layers]))
    export.export(model, export_format).save_pretrained(tmp_path)
    exported = run_exported.load(tmp_path)
    for lengths in [(9, 5), (1,), (20, 3, 11), (70,)]:
        assert export.verify(model, exported, prompts(*lengths), 12).passed


@pytest.mark.parametrize("export_format", FORMATS[:2])
def test_a_decoder_with_interleaved_heads_exports(export_format, tmp_path, monkeypatch, capsys):
    needs(export_format)
    model, directory, out = interleave_heads(tiny_source(num_hidden_layers=1), 2), tmp_path / "tiny", tmp_path / "out"
    for weight in mixing_parameters(model):
        torch.nn.init.normal_(weight, std=0.01)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    arguments = ["export", directory, out, "--format", export_format, "--try", PROMPT]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    export.main()
    assert "32 of 32 greedy tokens are the model's" in capsys.readouterr().out
    assert '"iha" layers' in (out / "README.md").read_text(encoding="utf-8")
    exported = run_exported.load(out)
    for lengths in [(1,), (20, 3, 11)]:  # other numbers of rows and tokens than those that were traced
        assert export.verify(model.eval(), exported, prompts(*lengths), 12).passed


@pytest.mark.parametrize("export_format", FORMATS)
def test_a_fresh_process_runs_an_export(checkpoint, exported, export_format, tmp_path):
    """Run the copy of the loop that the export holds, without this repository, up to each row's end.

    Signals are heard after OpenVINO's graphs are freed.
    """
    model, out, texts = checkpoint[0], exported(export_format), [PROMPT, "the"]
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); import run_exported; run_exported.main()\n"
        "signal.signal(signal.SIGCHLD, lambda *_: print('heard'))\n"
        "os.kill(os.getpid(), signal.SIGCHLD)"
    )
    process = subprocess.run(
        # The fault handler has a signal stack, as that of a test run has.
        [sys.executable, "-I", "-X", "faulthandler", "-c", program, out, *texts, "--max-new-tokens", "20"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    tokenizer = tiny_tokenizer()
    expected = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        row = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
        row = row[: row.index(2)] if 2 in row else row
        # The tokenizer puts a blank between two words, and none before the first that it decodes.
        expected.append(f"{text} {tokenizer.decode(row)}")
    assert process.stdout.splitlines() == [*expected, "heard"]


def test_an_export_that_differs_is_not_kept(checkpoint, exported, loaded, cli, monkeypatch, tmp_path):
    directory, runners = exported("dynamo"), loaded("dynamo")

    def export_another(model, export_format):
        break_one_parameter(model)
        return SimpleNamespace(save_pretrained=partial(shutil.copytree, directory, dirs_exist_ok=True))

    monkeypatch.setattr(export, "export", export_another)
    monkeypatch.setattr(run_exported, "load", lambda directory: runners)
    code, _, error = cli(export, checkpoint[1], tmp_path / "new" / "out", "--format", "dynamo", "--try", PROMPT)
    assert code == 1 and "does not compute what" in last_line(error)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused_before_any_work(checkpoint, cli, monkeypatch, tmp_path):
    _, directory = checkpoint
    monkeypatch.setattr(export, "load_model", None)  # nothing reads weights
    code, _, error = cli(export, directory, tmp_path / "out", "--format", "dynamo", "--max-new-tokens", 1)
    assert code == 2 and error.endswith("--max-new-tokens 1: expected at least 2\n")

    def refusal(model, *arguments):
        code, _, error = cli(export, model, tmp_path / "out", *arguments)
        assert code == 1 and not (tmp_path / "out").exists()
        return last_line(error)

    tiny_source().save_pretrained(tmp_path / "llama")
    assert "expected 'iha'" in refusal(tmp_path / "llama", "--format", "dynamo")
    assert "has no tokens" in refusal(directory, "--format", "dynamo", "--try", " ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--format onnx needs onnx, onnxscript, onnxruntime: " in refusal(directory, "--format", "onnx")
