"""Run every benchmark at tiny sizes, from its command line to its report, and test what its figures rest on."""

import json
import sys
from itertools import product

import pytest
import torch
from tiny_sources import tiny_source

from iha.errors import ROOT, UserError
from modeling_iha import sdpa_in_blocks
from research.benchmarks import (
    any_decoder,
    compiled,
    decode_model,
    default_form,
    gpu,
    layer,
    obvious,
    overhead,
    prefill,
    report,
    schedule,
)


TOKENS = 128
COMMANDS = [layer, prefill, schedule, decode_model]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the directory that all benchmarks wrote to."""
    directory = tmp_path_factory.mktemp("benchmarks")
    tiny_source("llama").save_pretrained(directory / "llama")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(decode_model, "smollm2_gguf", lambda: directory / "llama")
        for name in ("hidden_size", "intermediate_size"):
            monkeypatch.setitem(any_decoder.SIZES, name, 128)
        # One process less for each form
        monkeypatch.setattr(prefill, "extra_bytes", lambda prepare, sizes, small: prepare(*small)() or 1)
        for script in (*COMMANDS, any_decoder, obvious):
            options = ["--tokens", str(TOKENS), "--repeats", "1", "--out", str(directory)]
            options += ["--threads", "1", "--dtypes", "float32"] if script in (any_decoder, obvious) else []
            monkeypatch.setattr(sys, "argv", ["any", *options])
            script.main()
    return directory


def test_compiled_steps_beside_uncompiled_ones(tmp_path, monkeypatch):
    """Check the table alone; tests/modeling/test_compile.py compiles."""
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    monkeypatch.setattr(compiled, "TOKENS_PER_STEP", 256)
    monkeypatch.setattr(sys, "argv", ["any", "--tokens", "128", "--repeats", "1", "--out", str(tmp_path)])
    compiled.main()
    rows = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert [(row["family"], row["padding"] is None) for row in rows] == [
        ("IHAForCausalLM", True),
        ("IHAForCausalLM", False),
        ("Mistral", False),
        ("Llama", True),
    ]
    for row in rows:
        names = [name for name in row["seconds"] if not name.endswith(" compiled")]
        pairs = {f"{name} compiled / {name}" for name in names}
        others = {f"{name}{form} / {names[0]}{form}" for name in names[1:] for form in ("", " compiled")}
        assert row["ratios"].keys() == pairs | others and all(ratio > 0 for ratio in row["ratios"].values())


# For each layer of `overhead`: the most operators and Python calls beyond those of a plain Llama, forward without
# gradients and in a training step. These were counted with PyTorch 2.13, and are a little higher than what was found.
MOST_OPERATORS = {
    "interleaved, P = 2": (42, 104),
    "interleaved, P = 2, with a window": (42, 104),
    "all mha": (0, 0),
    "all iha, P = 2": (64, 136),
    "interleaved, P = 2, kernels": (17, 50),
    "all iha, P = 2, kernels": (17, 50),
}
MOST_CALLS = {
    "interleaved, P = 2": (71, 124),
    "interleaved, P = 2, with a window": (75, 128),
    "all mha": (48, 48),
    "all iha, P = 2": (113, 166),
    "interleaved, P = 2, kernels": (125, 274),
    "all iha, P = 2, kernels": (159, 309),
}


def test_a_layer_costs_few_operators_calls_and_launches():
    models = overhead.build()
    plain = overhead.counts(models.pop("Llama"), "Llama")
    for form, model in models.items():
        found = overhead.counts(model, form)
        for place, name in enumerate(("inference", "training step")):
            operators = found[f"operators, {name}"] - plain[f"operators, {name}"]
            assert operators <= MOST_OPERATORS[form][place], (form, name, operators)
            calls = found[f"calls, {name}"] - plain[f"calls, {name}"]
            assert calls <= MOST_CALLS[form][place], (form, name, calls)
        launches = found["launches, inference"], found["launches, training step"]
        assert launches == ((2, 5) if form.endswith(overhead.KERNELS) else (0, 0)), form


def test_overhead_is_written_with_its_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["any", "--repeats", "1", "--out", str(tmp_path)])
    overhead.main()
    table = json.loads((tmp_path / "overhead.json").read_text())
    assert [row["pass"] for row in table["rows"]] == list(overhead.PASSES)
    for row in table["rows"]:
        assert row["seconds"].keys() == table["counts"].keys() and all(row["ratios"].values())


def test_nothing_that_git_tracks_is_written_unless_told():
    for script in (*COMMANDS, any_decoder, compiled, obvious, overhead, default_form, gpu):
        assert script.PARSER.parse_args([]).out.is_relative_to(ROOT / "outputs")


def test_a_layer_computes_what_the_obvious_implementation_does(results):
    """Expect a row for each case; `obvious` compares the outputs before it times them."""
    rows = json.loads((results / "obvious.json").read_text())["rows"]
    assert {(row["pass"], row["pseudo_heads"], row["window"] is not None) for row in rows} == set(
        product(("forward", "training"), (2, 4), (False, True))
    )
    assert all(row["ratios"][obvious.RATIO] > 0 for row in rows)


@pytest.mark.parametrize("script", COMMANDS, ids=lambda script: script.__name__)
def test_results(results, script):
    name = script.__name__.removeprefix("research.benchmarks.")
    table = json.loads((results / f"{name}.json").read_text())
    assert table["command"].startswith(f"python -m research.benchmarks.{name} ")
    assert table["threads"] in (1, [1])
    assert table["torch"] == torch.__version__ and table["predicted_by"]
    assert table["rows"]
    for row in table["rows"]:
        measured = {**row["seconds"], **row["ratios"], **row.get("extra_bytes", {})}
        assert measured and all(value > 0 for value in measured.values()), row
        assert row["predicted"] and all(value > 0 for value in row["predicted"].values()), row
        assert row["predicted"].keys() <= row["ratios"].keys()
    assert not list(results.glob(".*"))


def test_the_rule_of_the_default(monkeypatch, tmp_path, capsys):
    """Renew the results of one CPU row by row, fail where the default loses, and show all in the report."""
    cases = [("forward", 64, 2, 16), ("training", 200, 2, 16), ("decoding", 200, 2, None)]
    monkeypatch.setattr(default_form, "CASES", cases)
    monkeypatch.setattr(default_form, "IDLE_LIMIT", 1e9)
    monkeypatch.setattr(default_form, "BUSY_LIMIT", 1e9)
    monkeypatch.setattr(default_form, "SECONDS", 0)
    options = ["--out", str(tmp_path), "--threads", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["any", *options, "--busy", "0", "1", "--dtypes", "float32"])
    default_form.main()
    (path,) = tmp_path.glob("default_form/*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["pass"], row["busy"]) for row in rows] == [
        *[(part, 0) for part in ("forward", "training", "decoding")],
        *[(part, 1) for part in ("forward", "training", "decoding")],
    ]
    assert path.stem == default_form.cpu_name()
    monkeypatch.setattr(default_form, "IDLE_LIMIT", 0)
    monkeypatch.setattr(sys, "argv", ["any", *options, "--busy", "0", "--dtypes", "float32", "--cases", "decoding"])
    # Rows of an earlier run do not count.
    with pytest.raises(UserError, match="1 of 1 settings take more than 0 of SDPA's time idle"):
        default_form.main()
    assert len(json.loads(path.read_text())["rows"]) == 6
    lines = report.default_lines([json.loads(path.read_text())])
    assert any(line.startswith("| training, 200 tokens, P = 2, window: 16 | ") for line in lines)


def test_what_the_default_is_compared_with(monkeypatch):
    """Compare blocks with SDPA under a dense mask."""
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        calls.append((len(query), query.shape[2], None if attn_mask is None else attn_mask.shape[-1]))
        return sdpa(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(sdpa_in_blocks, "scaled_dot_product_attention", spy)
    runs = default_form.forms(torch.bfloat16, "forward", 128, 2, 16)
    runs["sdpa"]()
    assert calls == [(1, 256, 256)]
    runs["default"]()
    # The first 32 queries, and two blocks of 128 with the 32 keys before them.
    assert calls[1:] == [(1, 32, None), (2, 128, 128 + 32)]
