"""Find every fault of a command's input before anything is written, and name it in one line on standard error.

Faults are damaged and foreign checkpoints, impossible arguments, bad destinations, other runs, and signals.
"""

import fcntl
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_sources import VOCAB_SIZE, edit_config, edit_weights, save_released, save_tiny_source, shards, tiny_tokenizer

from common.command_io import ROOT, UserError, new_directory, run_cli, whole_file
from conversion_scripts import (
    check_remote_code,
    convert_dcformer_to_iha,
    convert_diffllama_to_iha,
    convert_iha_to_diffllama,
    convert_iha_to_llama,
    convert_llama_to_iha,
    verify_conversion,
)
from conversion_scripts.convert_diffllama_to_iha import convert as convert_diffllama
from conversion_scripts.convert_llama_to_iha import convert


# Kind of the source checkpoint -> the command that converts it.
CONVERTERS = {
    "llama": (convert_llama_to_iha, "--num-pseudo-heads", 2),
    "sharded": (convert_llama_to_iha, "--num-pseudo-heads", 2),
    "diffllama": (convert_diffllama_to_iha,),
    "dcformer": (convert_dcformer_to_iha,),
    "iha": (convert_iha_to_llama,),
    "diff": (convert_iha_to_diffllama,),
}
ALL = tuple(kind for kind in CONVERTERS if kind != "sharded")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with a whole checkpoint of every kind."""
    folder = tmp_path_factory.mktemp("sources")
    for name, model in {
        "llama": save_tiny_source(folder / "llama"),
        "diffllama": save_tiny_source(folder / "diffllama", "diffllama"),
    }.items():
        converted = {"llama": "iha", "diffllama": "diff"}[name]
        (convert(model, 2) if name == "llama" else convert_diffllama(model)).save_pretrained(folder / converted)
        for path in (folder / name).glob("tokenizer*"):
            shutil.copy(path, folder / converted)
    save_released(folder / "dcformer", form="safetensors")
    save_tiny_source(folder / "sharded", max_shard_size="20KB")
    assert len(shards(folder / "sharded")) > 2
    return folder


@pytest.fixture
def run(cli):
    """Convert a source of some kind."""

    def run(kind, source, destination, *options):
        module, *arguments = CONVERTERS[kind]
        return cli(module, source, destination, *arguments, *options)

    return run


def assert_refused(code, err, words):
    assert code == 1 and err.startswith("Error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert words in err
    assert "trust_remote_code" not in err and "weights_only" not in err


# Sources


def write(name, content):
    def damage(source):
        (source / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def set_config(field, value):
    return lambda source: edit_config(source, **{field: value})


def set_weight(suffix, change):
    """Replace the first weight whose name ends so by what `change` makes of it."""

    def edit(weights):
        name = next(name for name in sorted(weights) if name.endswith(suffix))
        weights[name] = change(weights[name]).contiguous()

    return lambda source: edit_weights(source, edit)


def first_value(value):
    def change(tensor):
        tensor.view(-1)[0] = value
        return tensor

    return change


def index(shard):
    """Move the weights out of the directory, and write an index that leads there."""

    def damage(source):
        weights = source / "model.safetensors"
        names = list(load_file(weights))
        weights.rename(source.parent / "model.safetensors")
        target = str(source.parent / "model.safetensors") if shard == "absolute" else shard
        content = {"metadata": {}, "weight_map": dict.fromkeys(names, target)}
        (source / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


def dangling(name):
    """Replace a file by a link to nothing, as in a copy of the Hub's cache without its blobs."""

    def damage(source):
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to("../blobs/0123")

    return damage


def folder(name):
    def damage(source):
        (source / name).unlink(missing_ok=True)
        (source / name).mkdir()

    return damage


class Custom:
    pass


def pickled_object(source):
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Custom()}, protocol=2))


def contradict(source):
    """Put a tensor of the first shard into the last too, with other values."""
    first, *_, last = shards(source)
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: value + 1}, last, metadata={"format": "pt"})


def whole_file_beside(source):
    """Write other weights than those of the shards into one file."""
    tensors = {name: value + 1 for shard in shards(source) for name, value in load_file(shard).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def second_shard(change):
    return lambda source: change(shards(source)[1])


INDEX = "model.safetensors.index.json"
UNREADABLE = {"truncated": b'{"a": ', "not UTF-8": b'{"a": "\xff\xfe"}', "list": b"[1]", "null": b"null"}
OWN_CODE = {"model_type": "toy", "auto_map": {"AutoConfig": "configuration_toy.ToyConfig"}}

LLAMAS, CONFIGURED = ("llama", "diffllama"), ("llama", "diffllama", "iha")
# Sources -> field of their config, values, and what the line says of each.
WRONG_VALUES = [
    (LLAMAS, "num_hidden_layers", (0, -1, 10**20, "6"), "num_hidden_layers"),
    (CONFIGURED, "num_hidden_layers", (9999,), "num_hidden_layers is 9999, and its files hold"),
    (CONFIGURED, "num_hidden_layers", (10**9,), "at most 10000"),
    (CONFIGURED, "hidden_size", (10**9,), "has the shape [61, 32], and by the config ["),
    (CONFIGURED, "vocab_size", (10**9,), "has the shape [61, 32], and by the config ["),
    (["iha"], "num_pseudo_heads", (10**8,), "has the shape [4, 4, 2], and by the config ["),
    (["sharded"], "intermediate_size", (20,), "model.layers.0.mlp.gate_proj.weight has the shape ["),
    (["llama", "iha"], "torch_dtype", ("float128",), "{field} is {value!r}; expected"),
    (["llama", "iha"], "dtype", (7,), "{field} is {value!r}; expected"),
    (["llama", "iha"], "quantization_config", ([1], 1), "{field} is {value!r}; expected"),
    (ALL, "auto_map", (["x"], None), "{field} is {value!r}; expected an object"),
    (["iha"], "attention_dropout", (None,), "attention_dropout"),
    (LLAMAS, "hidden_act", (["silu"],), "hidden_act"),
    (["llama"], "hidden_act", ("warp",), "hidden_act='warp'"),
    (["llama"], "_attn_implementation", ("org/kernel",), "'org/kernel' would load what is not"),
    (["llama"], "model_type", ("gemma",), "'gemma' cannot be converted"),
    (["llama"], "num_attention_heads", (3,), "number of attention heads (3)"),
    (["llama"], "attn_logit_softcapping", (50.0,), "attn_logit_softcapping=50.0"),
    # No class checks the fields of a DCFormer's config.
    *(
        (["dcformer"], field, values, "{field}={value!r}; it must be ")
        for fields, values in {
            ("vocab_size", "dim", "n_layer", "n_head", "block_size"): (None, True, 0, -1, 1.5, 10**20, "4", [4]),
            ("norm_eps", "rope_base"): (None, True, 0, -1.0, "1e-6", [1]),
            ("window_size",): (True, 0, -3, 1.5, "3", [3]),
            ("window_type",): (1, ["LG"], {}),
            ("use_qk_norm", "mgate", "query_wise", "use_dcmha"): (None, 0, "False"),
            ("mgate_dim",): (None, 0, "6"),
            ("eos_token_id",): ("2", -1, 1.5),
        }.items()
        for field in fields
    ),
    (["dcformer"], "model_type", (["dcformer"],), "model_type=['dcformer']"),
    (["dcformer"], "n_head", (5,), "dim=32 and n_head=5"),
]


def no_damage(source):
    pass


NAN, MAPS = first_value(float("nan")), ("attention.wqkv.weight", "dyn_w_proj.dw1", "dyn_w_proj.qkw", "dyn_w_proj.dd")
# Sources -> what is wrong, what the line says, and further options of the command.
FAULTS = {
    ALL: {
        "no config": (lambda source: (source / "config.json").unlink(), "no usable configuration"),
        **{
            f"config {how}": (write("config.json", UNREADABLE[how]), "no usable configuration: ") for how in UNREADABLE
        },
        **{
            f"generation config {how}": (
                write("generation_config.json", UNREADABLE[how]),
                "no usable generation_config",
            )
            for how in UNREADABLE
        },
        "generation config nowhere": (dangling("generation_config.json"), "no usable generation_config"),
        "generation config folder": (folder("generation_config.json"), "no usable generation_config"),
        **{f"index {how}": (write(INDEX, content), INDEX) for how, content in UNREADABLE.items()},
        "index nowhere": (dangling(INDEX), INDEX),
        "index without files": (write(INDEX, '{"metadata": {}}'), "weight_map=None"),
        "index of numbers": (write(INDEX, '{"metadata": {}, "weight_map": {"a": 1}}'), "looks for a in 1"),
        "index leads up": (index("../model.safetensors"), "'../model.safetensors'"),
        "index leads down and up": (index("a/../../model.safetensors"), "'a/../../model.safetensors'"),
        "index leads elsewhere": (index("absolute"), "expected a file of the same directory"),
        "NaN": (set_weight("norm.weight", NAN), "norm.weight of "),
        "infinity": (set_weight("norm.weight", first_value(float("-inf"))), "norm.weight of "),
    },
    LLAMAS: {
        "code of its own": (lambda source: edit_config(source, **OWN_CODE), "no command here runs the code"),
        "beyond float16": (
            set_weight("down_proj.weight", first_value(65536.0)),
            "layers.0.mlp.down_proj.weight of ",
            "--dtype",
            "float16",
        ),
    },
    ("llama", "dcformer"): {"pickle of an object": (pickled_object, "a pickle of more than tensors")},
    ("llama", "diffllama", "iha"): {"adapter": (write("adapter_config.json", "{}"), "holds a LoRA adapter")},
    ("llama",): {
        "no vocabulary": (lambda source: (source / "tokenizer.json").unlink(), "no usable tokenizer"),
        "tokenizer of another model": (
            lambda source: tiny_tokenizer(VOCAB_SIZE + 1).save_pretrained(source),
            "has the id 61, and the embedding has 61 rows",
        ),
        **{f"seed {n}": (no_damage, f"--seed {n} must be", "--seed", n) for n in (-1, 2**64, 99999999999999999999)},
        **{
            f"{heads} pseudo-heads": (no_damage, "num_pseudo_heads=", "--num-pseudo-heads", heads)
            for heads in (0, 10**9, 10**20)
        },
    },
    ("sharded",): {
        "cut shard": (second_shard(lambda path: os.truncate(path, 10_000)), "cannot be loaded"),
        "no safetensors": (second_shard(lambda path: path.write_bytes(b"not safetensors")), "cannot be loaded"),
        "lost shard": (second_shard(Path.unlink), "cannot be loaded"),
        "lost tensor": (
            lambda source: edit_weights(source, lambda w: w.pop("model.norm.weight", None)),
            "missing keys model.norm.weight",
        ),
        "further tensor": (
            lambda source: edit_weights(source, lambda w: w.update(extra=torch.zeros(1))),
            "unexpected keys extra",
        ),
        "contradiction": (contradict, "hold different values of"),
        "pointers of Git LFS": (
            second_shard(lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")),
            "only a pointer of Git LFS: fetch it again",
        ),
        "tied and different": (set_config("tie_word_embeddings", True), "its files hold two that differ"),
        "whole file beside": (whole_file_beside, f"model.safetensors and {INDEX} disagree"),
    },
    ("iha",): {
        "diverged mixing": (set_weight("q_mix.weight", NAN), "model.layers.0.self_attn.q_mix.weight of "),
        "end of text": (
            write("generation_config.json", '{"eos_token_id": "x"}'),
            "eos_token_id is 'x'; expected a number",
        ),
        "ends of text": (write("generation_config.json", '{"eos_token_id": [1, "x"]}'), "eos_token_id is [1, 'x']"),
    },
    ("dcformer",): {
        "no weights": (lambda source: shards(source)[0].unlink(), "holds no weights: expected model"),
        "no safetensors": (write("model.safetensors", "damaged"), "cannot be read"),
        "whole numbers": (set_weight("norm.weight", torch.Tensor.long), "has the dtype torch.int64"),
        **{
            f"{name} {how}": (set_weight(name, change), f"{name} has the shape")
            for name in MAPS
            for how, change in {
                "flat": torch.flatten,
                "scalar": torch.mean,
                "with a further dimension": lambda tensor: tensor[None],
                "cut": lambda tensor: tensor[..., :-1],
            }.items()
        },
        **{
            f"static map {how}": (set_weight("pre_proj.w", change), "pre_proj.w is not the identity")
            for how, change in {"scalar": torch.mean, "flat": torch.flatten, "wide": lambda w: w[..., :2]}.items()
        },
    },
}
CASES = [
    pytest.param(kind, damage, words, options, id=f"{name}-{kind}")
    for kinds, faults in FAULTS.items()
    for name, (damage, words, *options) in faults.items()
    for kind in kinds
] + [
    pytest.param(
        kind, set_config(field, value), words.format(field=field, value=value), [], id=f"{field} {value!r}-{kind}"
    )
    for kinds, field, values, words in WRONG_VALUES
    for value in values
    for kind in kinds
]


@pytest.mark.parametrize(("kind", "damage", "words", "options"), CASES)
def test_a_fault_is_one_line_and_leaves_nothing(kind, damage, words, options, sources, tmp_path, run):
    shutil.copytree(sources / kind, tmp_path / "source")
    damage(tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(kind, tmp_path / "source", tmp_path / "out", *options)
    assert_refused(code, err, words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["llama", "iha"])
@pytest.mark.parametrize("how", UNREADABLE)
def test_verification_names_a_damaged_checkpoint(kind, how, sources, tmp_path, cli):
    for name in ("llama", "iha"):
        shutil.copytree(sources / name, tmp_path / name)
    for name in ("config.json", "generation_config.json"):
        whole = (tmp_path / kind / name).read_bytes()
        (tmp_path / kind / name).write_bytes(UNREADABLE[how])
        arguments = (tmp_path / "llama", tmp_path / "iha", "--tokens", 20, "--max-new-tokens", 2)
        code, _, err = cli(verify_conversion, *arguments)
        assert_refused(code, err, str(tmp_path / kind))
        (tmp_path / kind / name).write_bytes(whole)


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: [mit\n---\n",
        b"---\nlicense: {{ license }}\ntags: *nothing\n---\n",
        b"---\n- a list\n---\n",
        b"---\nlicense: {a: 1}\n---\n",
        b"---\nlicense: 1.0\n---\n",
        b"\xff\xfe\x00",
        b"",
    ],
)
def test_no_card_costs_a_conversion(card, sources, tmp_path, run):
    shutil.copytree(sources / "llama", tmp_path / "source")
    (tmp_path / "source" / "README.md").write_bytes(card)
    code, _, err = run("llama", tmp_path / "source", tmp_path / "out")
    assert code == 0, err
    assert "license" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b'{"auto_map": []}', "auto_map=[]"),
        (b'{"auto_map": {"AutoConfig": 1}}', "auto_map={'AutoConfig': 1}"),
        *((content, "config.json") for content in UNREADABLE.values()),
    ],
)
def test_remote_code_with_a_damaged_config(config, words, tmp_path, cli):
    (tmp_path / "toy.py").write_text("")
    (tmp_path / "config.json").write_bytes(config)
    code, _, err = cli(check_remote_code, tmp_path)
    assert_refused(code, err, words)


def test_remote_code_that_is_no_text(tmp_path, cli):
    (tmp_path / "toy.py").write_bytes(b"\xff\xfe")
    code, out, err = cli(check_remote_code, tmp_path)
    assert_refused(code, err, "mistakes found: 1")
    assert "toy.py: no UTF-8 text" in out


# Destinations


def lay_out(folder, entries):
    """Make directories ("a/"), files ("a") and links ("a -> b")."""
    for entry in entries:
        name, _, target = entry.partition(" -> ")
        (folder / name).parent.mkdir(exist_ok=True)
        if target:
            (folder / name).symlink_to(folder / target)
        elif name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_text("mine")


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("entries", "destination", "words"),
    [
        (["out/precious.txt"], "out", "is not an empty directory"),
        (["empty/", "out -> empty"], "out", "is a symbolic link"),
        (["out -> nothing"], "out", "is a symbolic link"),
        (["file"], "file/out", "file is not a directory"),
        (["file"], "file/a/out", "file is not a directory"),
        (["link -> nothing"], "link/out", "link is not a directory"),
        ([], "/proc/a/out", "/proc/a/out cannot be made"),
        ([".out.tmp/precious.txt"], "out", "no run of this command made it: remove or rename it"),
        (["precious/", ".out.lock -> precious"], "out", "cannot be made"),
    ],
)
def test_a_bad_destination_is_found_before_anything_is_read(entries, destination, words, kind, tmp_path, run):
    lay_out(tmp_path, entries)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(kind, "no/such/source", tmp_path / destination)
    assert_refused(code, err, words)
    assert out == "" and sorted(tmp_path.rglob("*")) == before


def test_a_mount_point_is_no_destination(tmp_path, monkeypatch, run):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    code, out, err = run("llama", "no/such/source", tmp_path / "out")
    assert_refused(code, err, "is a mount point")
    assert out == ""


def test_the_current_directory_is_no_destination(tmp_path, monkeypatch, run):
    """Refuse to replace the directory in which the shell of the user stands."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run("llama", "no/such/source", ".")
    assert_refused(code, err, "is the current directory")
    assert out == ""


def test_no_permission_for_the_parent(tmp_path, monkeypatch, run):
    # The system is asked, because a superuser may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    code, out, err = run("llama", "no/such/source", tmp_path / "a" / "out")
    assert_refused(code, err, f"no permission to write in {tmp_path}")
    assert out == "" and not list(tmp_path.iterdir())


def test_parents_made_for_a_refused_source_go_again(tmp_path, run):
    code, _, err = run("llama", tmp_path / "absent", tmp_path / "a" / "b" / "out")
    assert_refused(code, err, "neither a directory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (".", "is a directory"),
        ("file/x", "cannot be written: Not a directory"),
        ("a" * 252, "File name too long"),
        ("/dev/null", "is no regular file"),
    ],
)
def test_figures_that_cannot_be_written(path, words, tmp_path, cli):
    (tmp_path / "file").write_text("mine")
    arguments = ("no/such/source", "no/such/source", "--json", tmp_path / path)
    code, out, err = cli(verify_conversion, *arguments)
    assert_refused(code, err, words)
    assert out == ""


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "figures.json"
    for content in ("old", "new"):
        with whole_file(path) as temporary:
            temporary.write_text(content)
    with pytest.raises(ZeroDivisionError), whole_file(path) as temporary:
        temporary.write_text("half")
        1 / 0
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("figures.json", "new")]


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "link") as temporary:
        temporary.write_text("figures")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "figures"


# Other runs, and signals


def write_slowly(destination, ready, go_on):
    """Run in a process of its own, with the signals of one that is started in a terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

    def main():
        with new_directory(destination) as directory:
            (directory / "file").write_text("half")
            ready.set()
            go_on.wait(30)
            (directory / "file").write_text("whole")

    run_cli(main)


@pytest.fixture
def start():
    """Start a run that waits in the middle, and return its process and the event that lets it go on."""
    context = multiprocessing.get_context("fork")  # a new interpreter would take seconds to import PyTorch
    processes = []

    def start(destination):
        ready, go_on = context.Event(), context.Event()
        process = context.Process(target=write_slowly, args=(destination, ready, go_on))
        process.start()
        processes.append(process)
        assert ready.wait(30)
        return process, go_on

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_a_living_run_is_left_alone(start, tmp_path, run):
    process, go_on = start(tmp_path / "out")
    for _ in range(2):
        code, out, err = run("llama", "no/such/source", tmp_path / "out")
        assert_refused(code, err, "Another run is writing")
        assert out == ""
    go_on.set()
    process.join(30)
    assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "whole"


def test_another_destination_of_the_same_folder_is_free(start, tmp_path):
    process, go_on = start(tmp_path / "out")
    with new_directory(tmp_path / "out2") as directory:
        (directory / "file").write_text("whole")
    go_on.set()
    process.join(30)
    assert process.exitcode == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["out", "out2"]


def test_what_a_killed_run_left_is_removed(start, tmp_path, capsys):
    for _ in range(2):
        process, _ = start(tmp_path / "out")
        process.kill()
        process.join()
        assert {path.name for path in tmp_path.iterdir()} == {".out.tmp", ".out.lock"}
    with new_directory(tmp_path / "out") as directory:
        assert not list(directory.iterdir())
        (directory / "file").write_text("mine")
    assert f"Removing {tmp_path / '.out.tmp'}, left by a run that was killed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_run_that_ends_while_the_next_one_begins(succeeds, tmp_path, monkeypatch):
    """Remove the lock file after the next run has opened it, and before that run locks it."""
    flock, calls = fcntl.flock, []

    def end_first(lock, operation):
        calls.append(lock)
        if len(calls) == 1:
            (tmp_path / ".out.lock").unlink()
            if succeeds:
                (tmp_path / "out").mkdir()
                (tmp_path / "out" / "file").write_text("whole")
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", end_first)
    if succeeds:
        with pytest.raises(UserError, match="already exists"), new_directory(tmp_path / "out"):
            pytest.fail("the work began")
    else:
        with new_directory(tmp_path / "out"):
            assert (tmp_path / ".out.lock").exists() and len(calls) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(number, start, tmp_path):
    process, _ = start(tmp_path / "a" / "out")
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 128 + number and not list(tmp_path.iterdir())


def test_signals_are_as_before_afterwards(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with new_directory(tmp_path / "out"):
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def race(destination, barrier):
    def main():
        barrier.wait(30)
        with new_directory(destination) as directory:
            (directory / str(os.getpid())).write_text("whole")
            time.sleep(0.01)

    run_cli(main)


def test_of_many_runs_at_once_one_succeeds(tmp_path):
    context = multiprocessing.get_context("fork")
    for i in range(5):
        barrier = context.Barrier(6)
        processes = [context.Process(target=race, args=(tmp_path / str(i), barrier)) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        assert sorted(process.exitcode for process in processes) == [0, 1, 1, 1, 1, 1]
        winner = next(process.pid for process in processes if process.exitcode == 0)
        assert [path.name for path in (tmp_path / str(i)).iterdir()] == [str(winner)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(i) for i in range(5)]


# As users run them


CONVERT_TWO = """
import runpy, sys
for source in ("nan", "unread"):
    sys.argv = ["convert", source, "out", "--num-pseudo-heads", "2"]
    try:
        runpy.run_module("conversion_scripts.convert_llama_to_iha", run_name="__main__")
    except SystemExit as stop:
        print("Exit code", stop.code)
"""


def test_commands_of_their_own_process_are_quiet_but_for_one_line(sources, tmp_path):
    nan, unread = (shutil.copytree(sources / "llama", tmp_path / name) for name in ("nan", "unread"))
    set_weight("norm.weight", first_value(float("nan")))(nan)
    set_config("pad_token_id", -1)(nan)
    write("generation_config.json", "{")(unread)
    process = subprocess.run(
        [sys.executable, "-u", "-c", CONVERT_TWO],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Imports may write lines of their own before "Reading".
    _, *outputs = re.split("^Reading .*\n", process.stdout, flags=re.MULTILINE)
    assert len(outputs) == 2, process.stdout
    for name, output in zip(("nan", "unread"), outputs):
        error, code = output.split("Exit code ")
        assert_refused(int(code), error, name)
    assert {path.name for path in tmp_path.iterdir()} == {"nan", "unread"}
