"""Find a fault of a source before anything is written, where a load would be silently wrong or run foreign code.

Any other fault is one line by `run_cli`, and test_borders.py tests what is written.
"""

import pickle
import shutil

import pytest
import torch
from tiny_sources import VOCAB_SIZE, edit_config, edit_weights, save_released, save_tiny_source, shards, tiny_tokenizer

from conversion_scripts import convert_dcformer_to_iha, convert_llama_to_iha


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
    },
    # No class checks a DCFormer, and numbers of one place broadcast.
    ("dcformer",): {
        **wrong("window_size", 1.5, "window_size"),
        **wrong("n_head", 5, "n_local_heads=4 and n_head=5"),
        "whole numbers": (set_weight("norm.weight", torch.Tensor.long), "has the dtype torch.int64"),
        "scalar": (set_weight("dyn_w_proj.qkw", torch.mean), "dyn_w_proj.qkw has the shape"),
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
    code, _, err = run(kind, tmp_path / "source", tmp_path / "new" / "out", *options)
    assert_refused(code, err, words)
    assert sorted(tmp_path.rglob("*")) == before
