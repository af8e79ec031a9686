"""Run what documents, cards and helps tell a new user to type, and find what they show, link to and name."""

import argparse
import ast
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import urllib.request
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from helpers import DOCUMENTS, decoder, small_config
from servers import answering
from tiny_sources import tiny_source
from tiny_training import byte_tokenizer, preset_config, saved
from transformers import AutoModelForCausalLM, Trainer, pipeline

import modeling_iha
from iha.errors import ROOT
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.mixing_weights import mixing_parameters
from modeling_iha.transformers_versions import FIRST_UNTESTED, OLDEST
from sft.arguments import RecipeParser


README = (ROOT / "README.md").read_text(encoding="utf-8")
# What the README converts, and what it says that this model answers.
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
# A tiny model needs no thirty steps and no long replies, and its tokens are bytes.
TINY_ARGUMENTS = {
    "sft.train": ["--max_steps", "2", "--max_length", "512", "--max_position_embeddings", "512"],
    "sft.score_reasoning": ["--max-new-tokens", "8"],
    "sft.make_reasoning_data": ["--rows", "20"],
}
# Examples of helps that run here. Of the others the arguments are read: they take hours, a GPU or a network, or are
# recipes, which tests/sft trains.
RUN = ("sft.make_reasoning_data", "sft.score_reasoning")


def anchor(heading: str) -> str:
    """Return the fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(text: str, heading: str) -> str:
    """Return the text between a heading of the second level and the next one."""
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_have_a_header_and_rows_of_one_width(document):
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        if not re.fullmatch(r"\|(?:[ :-]+\|)+", line):
            continue
        rows = [lines[index - 1], *takewhile(lambda row: row.startswith("|"), lines[index:])]
        widths = {len(re.findall(r"(?<!\\)\|", re.sub("`[^`]*`", "", row))) for row in rows}
        assert rows[0].startswith("|") and len(widths) == 1, (document, rows[0], widths)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_command_goes_on_only_after_a_backslash(document):
    for block in re.findall(
        r"^```sh\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        lines = block.splitlines()
        for line, following in zip(lines, lines[1:]):
            assert line.endswith("\\") or not re.match(r" |-|\d", following), following


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_linked_or_named_exists_and_code_stands_in_fences(document):
    """Reject indented blocks, whose commands a tool that wraps lines would join, and what a shell cannot read."""
    text = (ROOT / document).read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?:^|\n\n|^#.*\n)(?: {4}|\t)\S.*", outside, re.MULTILINE)
    for commands in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
    missing = []
    for target, fragment in re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)", text):
        path = (ROOT / document).parent / target
        if not path.exists():
            missing.append(target)
        elif fragment:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            missing += [f"{target}#{fragment}"] * (fragment not in map(anchor, headings))
    for name in re.findall(r"(?<![\w-])(?:conversion_scripts|sft|tests|research|docs)/[\w/.-]*\w", text):
        missing += [name] * ("NAME" not in Path(name).parts and not (ROOT / name).exists())
    here = re.sub(r"\| [0-9a-f]{7,40}\b[^|]*\|$", "|", text, flags=re.MULTILINE)  # test_claims.py reads the others
    for name in re.findall(r"python -m ((?:conversion_scripts|sft|research)[\w.]*)", here):
        known = name.endswith(".NAME") or (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
        missing += [name] * (not known)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    missing += [f"make {name}" for name in re.findall(r"`make ([\w-]+)`", text) if name not in targets]
    assert not missing


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/conftest.py"])
def test_the_files_that_are_named_exist(page):
    files = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"[\w/]+\.py\b", text) + [f"{name}.py" for name in re.findall(r'"(test_\w+)"', text)]
    assert named
    assert [name for name in named if not any(str(path).endswith(f"/{name}") for path in files)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_adapters_name_their_targets(document):
    """PEFT rejects a `LoraConfig` without them for a model that it does not know."""
    for arguments in re.findall(r"LoraConfig\((.*?)\)", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL):
        assert "target_modules=" in arguments


def test_the_arguments_are_those_of_docstrings_and_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["write_api.py", str(tmp_path / "API.md")])
    runpy.run_path(str(ROOT / "docs" / "write_api.py"), run_name="__main__")
    page = (ROOT / "docs" / "API.md").read_text(encoding="utf-8")
    assert (tmp_path / "API.md").read_text(encoding="utf-8") == page
    declared = {"IHAConfig": modeling_iha.IHAConfig.__annotations__}
    declared["interleave_heads"] = inspect.signature(modeling_iha.interleave_heads).parameters
    for name, arguments in declared.items():
        assert {*re.findall(r"^- `(\w+)`", section(page, name), re.MULTILINE)} == {*arguments}
    assert all(name in page for name in modeling_iha.__all__)


def test_the_model_types_are_counted():
    types = (ROOT / "docs" / "MODEL_TYPES.md").read_text(encoding="utf-8")
    exact = re.findall(r"^## AutoModelFor\w+: ([0-9]+) of [0-9]+ types are exact", types, re.MULTILINE)
    assert "{} model types of text and {} of images or sound".format(*exact) in " ".join(README.split())


def test_the_readme_names_the_versions_that_pip_takes():
    python, torch, oldest, first_untested = re.search(
        r"Python (\S+) or later, PyTorch (\S+) or later, and Transformers (\S+) or later, but before (\S+)\.\s",
        " ".join(section(README, "Install").split()),
    ).groups()
    assert (oldest, first_untested) == (OLDEST, FIRST_UNTESTED)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'python_requires=">={python}"' in setup and f'"torch>={torch}"' in setup


# What the README runs


def save_tiny_weights(directory: Path) -> None:
    """Save a tiny model that knows the README's answer by heart, and nothing else."""
    tokenizer = byte_tokenizer()
    model = tiny_source(vocab_size=len(tokenizer), num_hidden_layers=2)
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    tokens = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved(model, directory)


def steps(text: str) -> list[tuple[str, str, str]]:
    """Return the README's console commands and Python blocks in their order.

    Each is a tuple: "console" or "python", the code, and the output.
    """
    found = []
    for language, block in re.findall(r"^```(console|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "console":
            found += [
                ("console", *re.fullmatch(r"(.*)\n((?:.*\n)*)", part).groups()) for part in block.split("$ ")[1:]
            ]
        else:
            code, shown = re.fullmatch(r"(.*?)((?:^# [^\n]*\n)*)", block, re.DOTALL | re.MULTILINE).groups()
            found.append(("python", code, shown.replace("# ", "")))
    return found


def run(command: str, arguments: dict[str, list[str]]) -> None:
    """Run a console command in this process, which spares the imports, and add `arguments` to its own.

    `iha NAME` stands in `arguments` as "iha NAME", and `python -m NAME` as "NAME"."""
    if command.startswith("iha "):
        _, *words = shlex.split(command)
        sys.argv = ["iha.cli", *words, *arguments.get(f"iha {words[0]}", [])]
        runpy.run_module("iha.cli", run_name="__main__")
        return
    python, option, *words = shlex.split(command)
    assert (python, option) == ("python", "-m")
    sys.argv = [*words, *arguments.get(words[0], [])]
    runpy.run_module(words[0], run_name="__main__")


def without_figures(text: str) -> str:
    """Return `text` with its numbers replaced and its runs of blanks made one."""
    text = re.sub(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?", "#", text)
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines())


def assert_shows(shown: str, printed: str) -> None:
    """Assert that the README shows `printed`, whatever the figures; a line of three dots stands for any lines."""
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(f"{line}\n") for line in without_figures(shown).splitlines()
    ]
    assert re.fullmatch("".join(lines), without_figures(printed)), (
        f"The README shows\n{shown}\nand this was printed:\n{printed}"
    )


def losses(text: str) -> list[float]:
    """Return the losses of a text that Trainer printed."""
    return [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", text)]


def test_the_readme_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    # A checkout in which the Hub's checkpoint is a local directory, without a card.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name in ("sft", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    save_tiny_weights(tmp_path / SOURCE)

    for kind, content, shown in steps(README):
        capsys.readouterr()
        torch.manual_seed(1)  # a block that shows losses sets its own seed
        if kind == "console":
            run(content, TINY_ARGUMENTS)
        else:
            exec(compile(content, "README.md", "exec"), {})
        printed = capsys.readouterr().out
        assert_shows(shown, printed)
        if "Trainer(" in content:
            assert losses(shown)[-1] < losses(shown)[0]
            assert losses(shown) == pytest.approx(losses(printed), abs=0.02)

    for saved_model in ("smollm2-interleaved", "first-run/checkpoint-20"):
        model = AutoModelForCausalLM.from_pretrained(saved_model, trust_remote_code=True)
        assert model.generate(torch.arange(8)[None], max_new_tokens=4, min_new_tokens=4).shape == (1, 12)
    generate = pipeline("text-generation", "smollm2-interleaved", trust_remote_code=True)
    assert generate("a", max_new_tokens=4)[0]["generated_text"].startswith("a")

    [(_, code, _)] = steps((tmp_path / "smollm2-iha" / "README.md").read_text(encoding="utf-8"))  # of its card
    exec(compile(code, "README.md", "exec"), {})


def examples() -> list[str]:
    """Return the commands that docstrings and helps show, on one line each, without those that leave a name open."""
    return [
        " ".join(example.split())
        for path in sorted(ROOT.glob("*/*.py"))
        if path.parent.name != "tests"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for example in re.findall(r"(?m)^(?:examples?: )?\s*(python -m \w[^\[\n]*)$", node.value.replace("\\\n", " "))
    ]


def test_the_examples_of_helps_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    (tmp_path / "sft").symlink_to(ROOT / "sft")
    for name in ("smollm2-iha", "outputs/demo/sft/final"):
        saved(IHAForCausalLM(preset_config()), tmp_path / name)
    recipe, parse = RecipeParser.parse, argparse.ArgumentParser.parse_args

    def and_stop(parse, *arguments):
        parse(*arguments)
        raise SystemExit("The arguments are read.")

    # First the rows that others read. The server's arguments are read by typer: test_serving.py starts it.
    for example in sorted(examples(), key=lambda example: "make_reasoning_data" not in example):
        if any(name in example for name in RUN):
            run(example, TINY_ARGUMENTS)
        elif example.startswith("python") and "conversion_scripts.serve" not in example:
            with monkeypatch.context() as patch, pytest.raises(SystemExit, match="The arguments are read."):
                patch.setattr(argparse.ArgumentParser, "parse_args", lambda *given: and_stop(parse, *given))
                patch.setattr(RecipeParser, "parse", lambda *given: and_stop(recipe, *given))
                run(example, TINY_ARGUMENTS)


def base_and_rows(directory: Path) -> list[str]:
    """Save a tiny base model and rows, and return their paths."""
    tokenizer = byte_tokenizer()
    saved(tiny_source(vocab_size=len(tokenizer), num_hidden_layers=2), directory / "base")
    (directory / "rows").mkdir()
    rows = [{"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}] * 16
    (directory / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(directory / "base"), str(directory / "rows")]


def assert_loads_what_it_trained(left: dict) -> None:
    trained, loaded, tokens = left["trainer"].model.eval(), left["loaded"].eval(), torch.arange(3, 40)[None]
    with torch.no_grad():
        assert trained(tokens).logits.equal(loaded(tokens).logits)
    assert max(weight.abs().max() for weight in mixing_parameters(trained)) > 0


@pytest.mark.parametrize(("name", "file"), [("sft", "train.jsonl"), ("lora", "")])
def test_an_example_trains_on_a_file_or_a_folder_and_loads_what_it_saved(name, file, tmp_path, monkeypatch):
    path, (base, rows) = ROOT / "examples" / f"{name}.py", base_and_rows(tmp_path)
    words = [str(path), base, str(Path(rows, file)), str(tmp_path / "out"), "--max_steps", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert_loads_what_it_trained(runpy.run_path(str(path)))
    if name == "lora":
        card = (tmp_path / "out" / "README.md").read_text()
        assert "LoRA adapters of base, trained with interleaved heads" in card and "None" not in card


@pytest.mark.parametrize("name", ["sft", pytest.param("lora", marks=pytest.mark.slow)])
def test_an_example_starts_as_a_script(name, tmp_path):
    """Python looks in the directory of a script first, and the package is installed without `sft`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--help"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)


def test_the_example_from_scratch_goes_on_and_draws_its_losses(tmp_path, monkeypatch):
    path, counted, training_step = ROOT / "examples" / "from_scratch.py", [], Trainer.training_step
    step = lambda self, *args, **others: counted.append(1) or training_step(self, *args, **others)  # noqa: E731
    monkeypatch.setattr(Trainer, "training_step", step)
    from_preset, sizes = IHAConfig.from_preset, {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    monkeypatch.setattr(IHAConfig, "from_preset", lambda name, **fields: from_preset(name, **sizes, **fields))
    for steps_in_all, made in (("1", 1), ("2", 1), ("2", 0)):
        monkeypatch.setattr(sys, "argv", [str(path), str(path), str(tmp_path), "--max_steps", steps_in_all])
        counted.clear()
        left = runpy.run_path(str(path))
        assert len(counted) == made and left["trainer"].state.global_step == int(steps_in_all)
        assert left["written"].shape == (1, 100)
        assert_loads_what_it_trained(left)
    assert (tmp_path / "curve.png").stat().st_size > 1000


def assert_readable(figure) -> None:
    """Assert that a picture is used to its right edge, that no label is cut or covered, and that ticks are whole."""
    figure.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert max(box.x1 for box in boxes) > 0.9 * figure.bbox.width
    for axes, own in zip(figure.axes, boxes):
        assert axes.images or axes.get_xlabel()  # a scale says of what
        for label in (axes.title, axes.xaxis.label, axes.yaxis.label):
            place = label.get_window_extent()
            assert figure.bbox.x0 <= place.x0 and place.x1 <= figure.bbox.x1, label
            assert not any(place.overlaps(box) for box in boxes if box is not own and label.get_text()), label
        for ticks in (axes.get_xticks(), axes.get_yticks()) if axes.images else ():
            assert all(tick == int(tick) for tick in ticks), ticks


def figure_scale(figure) -> float:
    """Return the weight with the brightest colour in the first pattern."""
    return next(axes for axes in figure.axes if axes.images).images[0].norm.vmax


@pytest.mark.parametrize("way", ["iha", pytest.param("interleaved", marks=pytest.mark.slow), "paired"])
def test_the_example_of_patterns_draws_every_pair(way, tmp_path, monkeypatch, capsys):
    """Compare a pattern with the weights of the model, and reject a head and a layer that are not there."""
    model = IHAForCausalLM(small_config(attention_kinds=["mha", "iha"])) if way == "iha" else decoder("llama")
    if way != "iha":
        (modeling_iha.interleave_heads if way == "interleaved" else modeling_iha.pair_heads)(model, 2)
    model.save_pretrained(tmp_path / "model")
    path, picture = ROOT / "examples" / "attention_patterns.py", tmp_path / "patterns.png"
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "model"), "\n\t\n", str(picture), "--head", "1"])
    left = runpy.run_path(str(path))
    assert left["layer"] == (1 if way == "iha" else 0) and picture.stat().st_size > 10_000
    size = left["num_pseudo_heads"]
    assert left["weights"].shape == (3, size, 3, size)
    assert left["weights"].sum(dim=(2, 3)) == pytest.approx(torch.ones(3, size), abs=1e-5)
    last = left["attentions"][left["layer"]][0, 1, -1]  # the last pseudo-head of the last token
    assert left["weights"][-1, -1].flatten().equal(last)
    scale = figure_scale(left["figure"])
    assert scale == pytest.approx(float(left["weights"][1:, :, 1:].max()))  # without the first token, which has most
    figure = left["figure"]
    assert ("head 1" if way != "paired" else "group 1") in figure.get_suptitle()
    assert_readable(figure)
    pictures = [axes for axes in figure.axes if axes.images]
    assert len(pictures) == size**2 + (0 if way == "paired" else 4)
    assert len(figure.axes) - len(pictures) == (1 if way == "paired" else 2)  # scales
    for wrong in (["--head", "9"], ["--layer", "7"]):
        monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "model"), "\n", str(picture), *wrong])
        with pytest.raises(SystemExit):
            runpy.run_path(str(path))
        assert "expected a layer among" in capsys.readouterr().err


def said_by(path: Path, words: list[str], monkeypatch, capsys) -> str:
    """Return what an example prints on stderr before it stops."""
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    with pytest.raises(SystemExit):
        runpy.run_path(str(path))
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["sft", "lora", "attention_patterns"])
def test_an_example_answers_a_wrong_name_in_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)  # a Hub that is not there is asked again for seconds
    path, (base, rows) = ROOT / "examples" / f"{name}.py", base_and_rows(tmp_path)
    wrong = str(tmp_path / "nowhere")
    words = ["prompt", "out.png"] if name == "attention_patterns" else [rows, "out"]
    said = said_by(path, [wrong, *words], monkeypatch, capsys)
    assert said.startswith(f"Error: {wrong} is not a directory, and {tmp_path} is one: expected a directory in it")
    if name == "attention_patterns":
        assert "patterns.xyz: expected a file name that ends in one of ." in said_by(
            path, [base, "prompt", "patterns.xyz"], monkeypatch, capsys
        )
    else:
        for missing in (wrong, f"{wrong}.jsonl", "no-such-dataset"):
            assert said_by(path, [base, missing, "out"], monkeypatch, capsys).startswith(f"Error: {missing}")


def test_the_example_from_scratch_refuses_a_short_text_and_a_wrong_path(tmp_path, monkeypatch, capsys):
    path = ROOT / "examples" / "from_scratch.py"
    (tmp_path / "short.txt").write_text("a" * 511)
    for name in ("short.txt", "nowhere.txt"):
        monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / name), str(tmp_path / "out")])
        with pytest.raises(SystemExit):
            runpy.run_path(str(path))
        assert f"{name}: expected a file of at least 512 bytes" in capsys.readouterr().err


def test_the_example_of_patterns_reads_no_bytes_where_a_tokenizer_does_not_load(tmp_path, monkeypatch):
    IHAForCausalLM(small_config(attention_kinds="iha")).save_pretrained(tmp_path / "model")
    incomplete = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "model" / "tokenizer_config.json").write_text(incomplete)
    path, picture = ROOT / "examples" / "attention_patterns.py", tmp_path / "patterns.png"
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "model"), "\n", str(picture)])
    with pytest.raises(ValueError, match="backend tokenizer"):
        runpy.run_path(str(path))
    assert not picture.exists()


def test_the_example_of_patterns_refuses_a_model_without_virtual_tokens(tmp_path, monkeypatch, capsys):
    IHAForCausalLM(small_config(attention_kinds="mha")).save_pretrained(tmp_path / "model")
    path = ROOT / "examples" / "attention_patterns.py"
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "model"), "\n", str(tmp_path / "patterns.png")])
    with pytest.raises(SystemExit):
        runpy.run_path(str(path))
    assert "has no layer with virtual tokens" in capsys.readouterr().err


# The page on training from scratch

FROM_SCRATCH = (ROOT / "docs" / "FROM_SCRATCH.md").read_text(encoding="utf-8")
TINY_SCRATCH = {
    "sft.make_tokenizer": ["--vocab-size", "300"],
    "sft.train": shlex.split(
        "--max_steps 2 --eval_steps 2 --save_steps 2 --warmup_steps 1 --use_cpu true --bf16 false --max_length 64 "
        "--preset_fields num_hidden_layers=5 hidden_size=32 intermediate_size=64 num_attention_heads=8"
    ),
    "iha push": [],
}


def curl_request(command: str, server: str) -> urllib.request.Request:
    """Return the request of a curl command of the documents, to another server."""
    words = shlex.split(command)
    header = words[words.index("-H") + 1].split(": ")
    return urllib.request.Request(
        words[1].replace("http://localhost:8000", server), words[words.index("-d") + 1].encode(), dict([header])
    )


def test_the_page_from_scratch_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    (tmp_path / "sft").symlink_to(ROOT / "sft")
    (tmp_path / "train.txt").write_text(README)
    (tmp_path / "held.txt").write_text(README[::-1])  # a copy of the other would be rejected
    blocks, ran = re.findall(r"^```(sh|python)\n(.*?)^```", FROM_SCRATCH, re.DOTALL | re.MULTILINE), []
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "FROM_SCRATCH.md", "exec"), {})
            continue
        for command in block.replace("\\\n", " ").splitlines():
            if command.startswith("iha serve"):
                served = shlex.split(command)[2]
                continue
            if command.startswith("curl"):
                with answering(served) as url:
                    said = json.load(urllib.request.urlopen(curl_request(command, url), timeout=60))
                assert said["usage"]["completion_tokens"] > 0
                ran.append("iha serve")
                continue
            if "-m research." in command:  # tests/studies runs it in small
                continue
            words = command.split()
            ran.append(f"iha {words[1]}" if words[0] == "iha" else words[2])
            run(command, TINY_SCRATCH)
    assert {*TINY_SCRATCH, "sft.make_model", "iha serve"} == {*ran}
    card = (tmp_path / "run" / "final" / "README.md").read_text(encoding="utf-8")
    assert "rained from scratch" in card and (tmp_path / "run" / "final" / "curves.png").exists()
    assert "def main(" in capsys.readouterr().out
