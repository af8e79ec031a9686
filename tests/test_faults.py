"""Find a fault of a source before anything is written, where a load would be silently wrong or run foreign code.

Keep what is there: destinations, other runs, and signals. That any other fault is one line is a matter of `run_cli`.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_sources import VOCAB_SIZE, edit_config, edit_weights, save_released, save_tiny_source, shards, tiny_tokenizer

from conversion_scripts import convert_dcformer_to_iha, convert_llama_to_iha
from iha import errors
from iha.errors import UserError, run_cli
from iha.files import check_output_file, new_directory, whole_file, write_json
from iha.sources import locate


# Kind of the source checkpoint -> the command that converts it.
CONVERTERS = {
    **dict.fromkeys(("llama", "sharded"), (convert_llama_to_iha, "--num-pseudo-heads", 2)),
    "dcformer": (convert_dcformer_to_iha,),
}
BOTH = ("llama", "dcformer")  # one of Transformers' classes, and one whose weights are read by themselves


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with a whole checkpoint of every kind."""
    folder = tmp_path_factory.mktemp("sources")
    save_tiny_source(folder / "llama")
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
    assert "trust_remote_code" not in err and "weights_only" not in err  # what no command here can do


# Sources


def set_config(field, value):
    return lambda source: edit_config(source, **{field: value})


def set_weight(suffix, change):
    """Replace the first weight whose name ends so by what `change` makes of it."""

    def edit(weights):
        name = next(name for name in sorted(weights) if name.endswith(suffix))
        weights[name] = change(weights[name]).contiguous()

    return lambda source: edit_weights(source, edit)


def first_value(value):
    return lambda tensor: tensor.view(-1).index_fill(0, torch.tensor(0), value).view_as(tensor)


class Custom:
    pass


def pickled_object(source):
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Custom()}, protocol=2))


def whole_file_beside(source):
    """Write other weights than those of the shards into one file."""
    tensors = {name: value + 1 for shard in shards(source) for name, value in load_file(shard).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


INDEX = "model.safetensors.index.json"
OWN_CODE = {"model_type": "toy", "auto_map": {"AutoConfig": "configuration_toy.ToyConfig"}}
NAN, LFS = first_value(float("nan")), "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"


def wrong(field, value, words):
    """Return a wrong value of a config's field as an item of `FAULTS`."""
    return {f"{field} {value!r}": (set_config(field, value), words)}


# Sources -> what is wrong, what the line says, and further options of the command.
FAULTS = {
    BOTH: {
        "NaN": (set_weight("norm.weight", NAN), "norm.weight of "),
        "pickle of an object": (pickled_object, "a pickle of more than tensors"),
    },
    ("llama",): {
        **wrong("_attn_implementation", "org/kernel", "'org/kernel' would load what is not"),
        "adapter": (lambda source: (source / "adapter_config.json").write_text("{}"), "holds a LoRA adapter"),
        "its own code": (lambda source: edit_config(source, **OWN_CODE), "no command here runs the code"),
        "beyond float16": (
            set_weight("down_proj.weight", first_value(65536.0)),
            "layers.0.mlp.down_proj.weight of ",
            "--dtype",
            "float16",
        ),
        "tokenizer of another model": (
            lambda source: tiny_tokenizer(VOCAB_SIZE + 1).save_pretrained(source),
            "has the id 61, and the embedding has 61 rows",
        ),
    },
    ("sharded",): {
        **wrong("intermediate_size", 20, "mismatched keys "),
        "lost tensor": (
            lambda source: edit_weights(source, lambda w: w.pop("model.norm.weight", None)),
            "missing keys model.norm.weight",
        ),
        "pointers of Git LFS": (lambda source: shards(source)[1].write_text(LFS), "of Git LFS: fetch it again"),
        "tied and different": (set_config("tie_word_embeddings", True), "its files hold two that differ"),
        "whole file and index": (
            whole_file_beside,
            f"model.safetensors and {INDEX} disagree",
            "--dtype",
            "float32",
        ),
    },
    # No class checks a DCFormer, and numbers of one place broadcast.
    ("dcformer",): {
        **wrong("use_dcmha", "False", "use_dcmha"),
        **wrong("window_size", 1.5, "window_size"),
        **wrong("n_head", 5, "n_local_heads=4 and n_head=5"),
        "whole numbers": (set_weight("norm.weight", torch.Tensor.long), "has the dtype torch.int64"),
        **{
            f"{name} scalar": (set_weight(name, torch.mean), f"{name} has the shape")
            for name in ("attention.wqkv.weight", "dyn_w_proj.dw1", "dyn_w_proj.qkw", "dyn_w_proj.dd")
        },
        "static map scalar": (set_weight("pre_proj.w", torch.mean), "pre_proj.w is not the identity"),
    },
}
CASES = [
    pytest.param(kind, damage, words, options, id=f"{name}-{kind}")
    for kinds, faults in FAULTS.items()
    for name, (damage, words, *options) in faults.items()
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


# Destinations


def test_a_bad_destination_is_found_before_anything_is_read(tmp_path, run):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    before = sorted(tmp_path.rglob("*"))
    for destination, words in (("full", "is not an empty directory"), ("link", "is a symbolic link")):
        code, out, err = run("llama", tmp_path, tmp_path / destination)
        assert_refused(code, err, words)
        assert out == "" and sorted(tmp_path.rglob("*")) == before


# Other runs, and signals


def write_slowly(destination, ready, go_on):
    """Run in a separate process, with the signals of one that is started in a terminal."""
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


def test_a_signal_after_the_directory_is_whole_says_so(tmp_path, monkeypatch):
    """The signal comes while the temporary directory is cleared away, after it was renamed."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        with new_directory(tmp_path / "out") as directory:
            (directory / "file").write_text("whole")
            monkeypatch.setattr(shutil, "rmtree", interrupted)
    monkeypatch.undo()
    assert (tmp_path / "out" / "file").read_text() == "whole"
    assert stopped.value.__notes__ == [f"{tmp_path / 'out'} is complete."]


def test_a_living_run_is_left_alone(start, tmp_path, run):
    process, go_on = start(tmp_path / "out")
    for _ in range(2):
        code, out, err = run("llama", tmp_path, tmp_path / "out")
        assert_refused(code, err, "Another run is writing")
        assert out == ""
    go_on.set()
    process.join(30)
    assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "whole"


def test_what_a_killed_run_left_is_removed(start, tmp_path):
    for _ in range(2):
        process, _ = start(tmp_path / "out")
        process.kill()
        process.join()
        assert {path.name for path in tmp_path.iterdir()} == {".out.unfinished", ".out.lock"}
    with new_directory(tmp_path / "out") as directory:
        assert not list(directory.iterdir())
        (directory / "file").write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_a_home_directory_is_found_in_a_call_from_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with new_directory("~/out") as directory:
        (directory / "file").write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(number, start, tmp_path):
    process, _ = start(tmp_path / "out")
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 128 + number and not list(tmp_path.iterdir())


def test_a_signal_leaves_no_half_of_a_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "table.json") as temporary:
        temporary.write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)
    assert not list(tmp_path.iterdir())


def test_a_defect_of_an_installed_package_is_one_line(tmp_path, capsys):
    """Raise an exception where every file is in site-packages."""
    file = tmp_path / "site-packages" / "command.py"
    code = compile("def fail():\n    raise KeyError('lost')\n", file, "exec")
    names = {}
    exec(code, names)
    error = pytest.raises(KeyError, names["fail"]).value
    error.__traceback__ = error.__traceback__.tb_next
    explained = errors._explained(error, ["iha cost"])
    assert "failed in command.py, line 2: KeyError" in explained


def test_parents_that_a_run_made_go_with_it(tmp_path):
    (tmp_path / "there").mkdir()
    for destination in (tmp_path / "new" / "newer" / "out", tmp_path / "there" / "new" / "out"):
        with suppress(KeyError), new_directory(destination):
            raise KeyError
        assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with new_directory(tmp_path / "new" / "newer" / "out"):
        pass
    assert (tmp_path / "new" / "newer" / "out").is_dir()


def test_no_path_is_taken_for_a_reason(sources, tmp_path, run):
    """Give the reason of an error and not one whose words are in the path."""
    place = shutil.copytree(sources / "llama", tmp_path / "weights_only" / "trust_remote_code")
    (place / "model.safetensors").unlink()
    _, _, err = run("llama", place, tmp_path / "out")
    assert "no file named model.safetensors" in err


def test_a_home_directory_is_found_for_every_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # where broken code would make a directory "~"
    check_output_file("~/figures.json")
    write_json("~/figures.json", {})
    assert (tmp_path / "figures.json").read_text() == "{}\n"
    with pytest.raises(UserError, match="~nobody-of-this-name/model is not a directory|is neither a directory"):
        locate("~nobody-of-this-name/model")


def test_a_private_directory_stays_private(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    with new_directory(tmp_path / "out") as directory:
        (directory / "file").touch()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
