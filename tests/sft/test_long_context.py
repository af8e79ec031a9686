"""Test that recipes' positions, RoPE and windows are checked, and that long rows keep little in memory."""

import gc
import time
from pathlib import Path

import pytest
import torch
from helpers import assert_close, random_ids, random_model
from tiny_training import byte_tokenizer, recipe, sizes
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from iha.errors import UserError
from iha.model_cost import passes_of_model
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads
from sft.arguments import RecipeParser
from sft.base_model import find_start, rope_reach, run_config, settle_pseudo_heads
from sft.train import USAGE


FIELDS = {"vocab_size": 259, "sliding_window": 8, "layer_types": "sliding_attention"}
LLAMA = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "iha": IHAConfig.from_preset("tiny", **FIELDS),
    "shared": IHAConfig.from_preset("tiny", **FIELDS, pseudo_positions="shared"),
    "mha": IHAConfig.from_preset("tiny", vocab_size=259, attention_kinds="mha"),
    "all_heads": IHAConfig.from_preset("tiny", vocab_size=259, pseudo_collapse="all_heads"),
    "llama": LlamaConfig(**LLAMA),
    "window": interleave_heads(LlamaForCausalLM(LlamaConfig(**LLAMA)), 2, sliding_window=16).config,
    "interleaved": interleave_heads(LlamaForCausalLM(LlamaConfig(**LLAMA)), 2).config,
}


def checked(tmp_path, kind, **keys):
    """Return the config of a run by a recipe and a directory that holds a config.json and no weights."""
    CONFIGS[kind].save_pretrained(tmp_path / "model")
    arguments = sizes(tmp_path / "model", "rows.jsonl", tmp_path / "run", **keys)
    run, args = RecipeParser(USAGE).parse(["--config", recipe("demo"), *arguments])
    start = find_start(run)
    settle_pseudo_heads(start, run)
    return run_config(start, run, args)


def test_the_recipe_sets_positions_rope_base_and_window(tmp_path):
    changes = {"max_length": 4096, "max_position_embeddings": 8192, "rope_theta": 5e5, "sliding_window": 16}
    config = checked(tmp_path, "iha", **changes)
    assert (config.max_position_embeddings, config.sliding_window) == (8192, 16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert IHAConfig.from_pretrained(tmp_path / "model").max_position_embeddings == 512


def test_windows_grow_with_the_context(tmp_path):
    longer = {"max_length": 64, "max_position_embeddings": 4096, "sliding_window": "scale"}
    assert checked(tmp_path / "iha", "iha", **longer).sliding_window == 64  # 8 of 512
    assert checked(tmp_path / "window", "window", **longer).interleaved_window == 32  # 16 of 2,048
    for kind in ("mha", "llama"):
        config = checked(tmp_path / kind, kind, **longer)
        assert config.max_position_embeddings == 4096 and getattr(config, "sliding_window", None) is None
    with pytest.raises(UserError, match="sliding_window: scale lets windows grow .*: set that key too"):
        checked(tmp_path / "none", "iha", sliding_window="scale")


def test_the_papers_windows_scaled_to_64k_keep_the_flops_of_global_attention(tmp_path):
    keys = {"max_length": 65536, "max_position_embeddings": 65536, "rope_theta": 8e6}
    costs = []
    for preset, window in (("iha", "scale"), ("iha", 10), ("global", "scale")):
        words = sizes(None, "rows", tmp_path, **keys, sliding_window=window, eval_strategy="no", eval_size=0)
        words += ["--preset", f"paper-2.4b-{preset}"]
        run, args = RecipeParser(USAGE).parse(["--config", recipe("paper_sft"), *words])
        costs.append(passes_of_model(run_config(find_start(run), run, args), 65536).prefill)
    scaled, unscaled, plain = costs
    assert scaled / plain == pytest.approx(1, abs=0.005) and unscaled / plain == pytest.approx(0.53, abs=0.005)


def test_the_recipes_p_is_left_to_a_checkpoint_that_has_another(tmp_path, capsys):
    CONFIGS["iha"].save_pretrained(tmp_path / "model")
    words = sizes(tmp_path / "model", "rows.jsonl", tmp_path / "run", eval_size=0, eval_strategy="no")
    file = tmp_path / "recipe.yaml"
    file.write_text("num_pseudo_heads: 5\nuse_cpu: true\n")
    run, args = RecipeParser(USAGE).parse(["--config", str(file), *words])
    start = find_start(run)
    settle_pseudo_heads(start, run)
    assert run_config(start, run, args).num_pseudo_heads == 2
    assert run.num_pseudo_heads is None and "keeps its 2" in capsys.readouterr().out


def test_the_p_of_a_preset_is_one_of_its_fields(tmp_path):
    words = sizes(None, "rows.txt", tmp_path / "run", eval_size=0, preset="tiny", num_pseudo_heads=4)
    run, _ = RecipeParser(USAGE).parse(words)
    with pytest.raises(UserError, match="tiny has 2: give --preset_fields num_pseudo_heads=4 instead"):
        settle_pseudo_heads(find_start(run), run)


@pytest.mark.parametrize(
    "kind, keys, named",
    [
        ("iha", {"max_length": 513}, "max_length=513 is beyond the model's 512 positions"),
        ("llama", {"max_length": 4096}, "max_length=4096 is beyond the model's 2048 positions"),
        ("iha", {"num_pseudo_heads": 4}, "states num_pseudo_heads=4 and .* has 2"),
        ("mha", {"num_pseudo_heads": 2}, "states num_pseudo_heads=2 and .* has 1"),
        (
            "mha",
            {"sliding_window": 8},
            "does not fit .*: sliding_window=8 with the layer_types",
        ),
        ("llama", {"sliding_window": 8}, "a 'llama' model has no such field"),
        ("interleaved", {"num_pseudo_heads": 3}, "states num_pseudo_heads=3 and .* has 2: give the plain base model"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused_before_weights_are_read(tmp_path, kind, keys, named):
    with pytest.raises(UserError, match=named) as refused:
        checked(tmp_path, kind, **keys)
    assert "\n" not in str(refused.value) and "validator" not in str(refused.value)


def test_interleaved_positions_must_lie_within_the_longest_wavelength_of_rope(tmp_path):
    # head_dim 16 and base 10,000: 2 pi 10,000^(14/16), about 19,869 positions, two of them to a token.
    reach = int(rope_reach(CONFIGS["iha"]))
    assert reach == 19869
    within, beyond = reach // 2, reach // 2 + 1
    checked(tmp_path, "iha", max_length=within, max_position_embeddings=within)
    with pytest.raises(UserError, match=f"{beyond} tokens x 2 pseudo-heads reach position {2 * beyond}") as refused:
        checked(tmp_path, "iha", max_length=beyond, max_position_embeddings=beyond)
    advised = str(refused.value).partition("at least ")[2].partition(",")[0]
    checked(tmp_path, "iha", max_length=beyond, max_position_embeddings=beyond, rope_theta=advised)
    for kind in ("shared", "mha"):
        checked(tmp_path, kind, max_length=beyond, max_position_embeddings=beyond)
        with pytest.raises(UserError, match=f"{reach + 1} tokens reach position {reach + 1}"):
            checked(tmp_path, kind, max_length=reach + 1, max_position_embeddings=reach + 1)


# N, P and so many entries of a P-fold tensor that no other tensor has them.
LENGTH, PSEUDO_HEADS = 48, 4
SPECIAL = {"vocab_size": 64, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 10}
P_FOLD = LENGTH * PSEUDO_HEADS * 4 * 10


def kept_after_forward(prepare):
    """Return the sizes of the tensors that a training forward keeps, in entries, and the gradients."""
    model = random_model(IHAConfig.from_preset("tiny", **SPECIAL, num_pseudo_heads=PSEUDO_HEADS)).train()
    prepare(model)
    ids = random_ids(1, LENGTH)
    saved = []
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids, use_cache=False).loss
    gc.collect()
    alive = [x.numel() for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in before]
    loss.backward()
    return {*saved, *alive}, [parameter.grad for parameter in model.parameters()]


def test_checkpointing_keeps_no_p_fold_activation():
    plain, expected = kept_after_forward(lambda model: None)
    assert P_FOLD in plain
    checkpointed, gradients = kept_after_forward(lambda model: model.activation_checkpointing_enable())
    assert max(checkpointed) < P_FOLD
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other)


class Kept(saved_tensors_hooks):
    """Stand in for `save_on_cpu`, which pins memory and needs a GPU, and record the sizes of what is kept."""

    sizes: list[int] = []

    def __init__(self, pin_memory, device_type):
        super().__init__(self.keep, lambda tensor: tensor.clone())

    def keep(self, tensor):
        self.sizes.append(tensor.numel())
        return tensor.detach().clone()


@pytest.mark.parametrize("kind", ["iha", "interleaved"])
def test_checkpoints_in_the_memory_of_the_host_change_no_step(kind, monkeypatch):
    """Take two steps with `gradient_checkpointing_kwargs: {"offload": true}`, and without it."""
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Kept)
    monkeypatch.setattr(Kept, "sizes", [])
    weights = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = IHAForCausalLM(CONFIGS["iha"]) if kind == "iha" else LlamaForCausalLM(LlamaConfig(**LLAMA))
        model = model if kind == "iha" else interleave_heads(model, 2)
        model.train().activation_checkpointing_enable(offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(2):
            ids = random_ids(2, LENGTH, seed=seed)
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert Kept.sizes == [2 * LENGTH * model.config.hidden_size] * model.config.num_hidden_layers * 2


def memory(field):
    """Return the bytes that this process holds ("VmRSS"), or the most since the peak was set back ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


@pytest.mark.slow
def test_a_forward_and_backward_at_64k_tokens_take_less_than_1_2_gb():
    """Train the paper's schedule with P = 2 and W = N / (2 P^2), with checkpointing."""
    tokens = 65536
    config = IHAConfig.from_preset(
        "paper-2.4b-iha",
        **{"vocab_size": len(byte_tokenizer()), "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "num_hidden_layers": 5, "num_pseudo_heads": 2},
        **{"max_position_embeddings": tokens, "bos_token_id": 0, "eos_token_id": 0},
        rope_parameters={"rope_type": "default", "rope_theta": 8e6},
    )
    assert config.layer_types == ["sliding_attention"] * 4 + ["full_attention"] and config.sliding_window == 8192
    assert config.attention_kinds == ["iha"] * 4 + ["mha"] and rope_reach(config) > 2 * tokens
    model = random_model(config).train()
    model.activation_checkpointing_enable()
    add_fused_lm_head(model)
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    Path("/proc/self/clear_refs").write_text("5")
    held = memory("VmRSS")  # by PyTorch, and by the tests that this process ran before
    start, cpu = time.perf_counter(), time.process_time()
    loss = model(ids, labels=ids, fused_lm_head=True).loss
    loss.backward()
    print(
        f"\n{tokens} tokens: {time.perf_counter() - start:.0f} s ({time.process_time() - cpu:.0f} s of CPU time), "
        f"peak {memory('VmHWM') / 1e9:.2f} GB in the process, of which {held / 1e9:.2f} GB were there before"
    )
    assert loss.isfinite() and all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert memory("VmHWM") - held < 1.2e9
