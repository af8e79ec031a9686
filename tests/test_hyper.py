"""HyperAttention and 2-simplicial attention against the loops of `references/hyper.py`, and what the papers claim of
them."""

import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    FP32,
    FP64,
    GEOMETRIES,
    LOGITS,
    assert_attention_matches,
    assert_close,
    assert_gradients_match,
    attention_of_first_layer,
    gradients,
    learn_one_batch,
    logits_and_gradients,
    packing,
    padding,
    random_ids,
    random_model,
    relative_error,
    reload,
    small_config,
    uncached_logits,
)
from peft import LoraConfig, PeftModel, get_peft_model

from modeling_iha import IHAConfig, IHAForCausalLM, attention_hyper, tuple_attention
from modeling_iha.attention_hyper import linear_step
from modeling_iha.tuple_attention import BLOCK


OPTIONS = ("order", "sharing", "strict_order", "linear", "windows")


def hyper_config(window=None, kind="hyper", **fields):
    """Options of the kind are told from fields of the config by name."""
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    return small_config(
        attention_kinds=kind,
        attention_options={kind: options},
        layer_types="full_attention" if window is None else "sliding_attention",
        sliding_window=window,
        **{"num_hidden_layers": 1, **fields},
    )


CASES = {
    "sharing": {},
    "no_sharing": {"sharing": False},
    "strict": {"strict_order": True},
    "strict_no_sharing": {"strict_order": True, "sharing": False, "num_key_value_heads": 4},
    "biases": {"sharing": False, "attention_bias": True, "use_qk_norm": True, "num_key_value_heads": 1},
    "simplicial": {"kind": "simplicial"},
    "simplicial_biases": {"kind": "simplicial", "attention_bias": True, "use_qk_norm": True},
}
LINEAR_CASES = {
    "linear": {"linear": True},
    "linear_order_2": {"linear": True, "order": 2},
    "linear_order_4": {"linear": True, "order": 4, "sharing": False},
    "linear_biases": {"linear": True, "sharing": False, "attention_bias": True, "use_qk_norm": True},
}


@pytest.mark.parametrize("window", [None, 2, 4, 20])
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, window):
    assert_attention_matches(hyper_config(window, **CASES[case]), FP32, length=7)


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear_form_matches_reference(case):
    assert_attention_matches(hyper_config(**LINEAR_CASES[case]), FP32, length=7)


@pytest.mark.parametrize("windows", [[2, 4], [4, 2], [1, 3], [3, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("case", ["no_sharing", "strict", "simplicial"])
def test_two_windows_match_reference(case, windows):
    if case == "strict" and windows[1] == 1:
        pytest.skip("no pair has j > k where k is the query's own token: refused")
    assert_attention_matches(hyper_config(max(windows), windows=windows, **CASES[case]), FP32, length=7)


@pytest.mark.parametrize("case", ["sharing", "strict_no_sharing", "simplicial"])
def test_matches_reference_in_other_dtypes(case):
    assert_attention_matches(hyper_config(**CASES[case]), FP64, dtype=torch.float64, length=7)
    assert_attention_matches(hyper_config(**CASES[case]), BF16_OUTPUT, BF16_GRADIENT, dtype=torch.bfloat16, length=7)


@pytest.mark.parametrize("case", ["linear", "linear_order_4"])
def test_linear_form_matches_reference_in_other_dtypes(case):
    assert_attention_matches(hyper_config(**LINEAR_CASES[case]), FP64, dtype=torch.float64, length=7)
    assert_attention_matches(
        hyper_config(**LINEAR_CASES[case]), BF16_OUTPUT, BF16_GRADIENT, dtype=torch.bfloat16, length=7
    )


@pytest.fixture(params=[{"BLOCK": 3, "CHUNK": 3}, {"MAX_SCORES": 1}], ids=["blocks_of_3", "blocks_of_1"])
def small_blocks(request, monkeypatch):
    """Several blocks of queries, the last one short, or as few scores to a block as there can be."""
    for name, value in request.param.items():
        monkeypatch.setattr(attention_hyper if name == "CHUNK" else tuple_attention, name, value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("case", ["no_sharing", "strict", "simplicial"])
def test_blocks_match_reference(case, window, small_blocks):
    windows = {} if window is None else {"windows": [2, 3]}
    assert_attention_matches(hyper_config(window, **CASES[case], **windows), FP32, length=7)


@pytest.mark.parametrize("case", ["linear", "linear_order_4"])
def test_linear_chunks_match_reference(case, monkeypatch):
    monkeypatch.setattr(attention_hyper, "CHUNK", 3)
    assert_attention_matches(hyper_config(**LINEAR_CASES[case]), FP32, length=7)


@pytest.mark.parametrize("case", ["linear", "linear_order_4"])
def test_linear_form_under_a_mask_equals_running_sums(case, small_blocks):
    """A mask that says no more than causal: every query then sums what it sees, and nothing changes, gradients
    included."""
    model = random_model(hyper_config(**LINEAR_CASES[case]))
    input_ids, mask = random_ids(2, 7), torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    outputs = [model(input_ids, use_cache=False, **inputs).logits for inputs in ({}, {"attention_mask": mask})]
    assert relative_error(outputs[1], outputs[0].double()) < 1e-5
    leaves = dict(model.named_parameters())
    expected, actual = (gradients(output, leaves) for output in outputs)
    assert_gradients_match(actual, {name: gradient.double() for name, gradient in expected.items()}, 1e-5)


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@pytest.mark.parametrize("windows", [None, [3, 2]], ids=str)
@pytest.mark.parametrize("case", ["no_sharing", "strict", "simplicial", "linear_order_4"])
def test_padding_and_packing_match_reference(case, windows, core):
    options = {**CASES, **LINEAR_CASES}[case]
    if windows is not None and case in LINEAR_CASES:
        pytest.skip("the linear form has no windows")
    config = hyper_config(windows and max(windows), windows=windows, **options)
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert_attention_matches(config, FP32, core=core, length=7, inputs=padding(real))
    assert_attention_matches(config, FP32, core=core, length=7, rows=1, inputs=packing((3, 1, 3)))


@pytest.mark.parametrize("case", ["plain", "left_padding", "packed"])
@pytest.mark.parametrize("kind", ["hyper_feature", "hyper", "simplicial"])
def test_long_window_inputs_equal_a_dense_mask(kind, case):
    """On SDPA a long input to a window layer has no mask matrix: blocks take the columns that their windows reach.
    Gradients included."""
    options = {} if kind == "hyper_feature" else {kind: {"windows": [3, 5]}}
    window = {"layer_types": "sliding_attention", "sliding_window": 5, "num_hidden_layers": 1}
    model = random_model(small_config(attention_kinds=kind, attention_options=options, **window))
    inputs = {"input_ids": random_ids(2, 150), "use_cache": False}
    if case == "left_padding":
        inputs["attention_mask"] = torch.tensor([[0] * 73 + [1] * 77, [1] * 150])
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    if case == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(73), torch.arange(77)]).expand(2, -1)
    masks = model.model.create_masks(torch.empty(2, 150, 0), inputs.get("attention_mask"), None, None)
    assert masks["sliding_attention", 1].document_ids is not None
    actual, expected = (logits_and_gradients(model, core, **inputs) for core in ("sdpa", "eager"))
    for value, target in zip(actual, expected, strict=True):
        assert_close(value, target)


# Cost


def scores_of(model, length):
    """Sizes of the score tensors of a forward pass of the model."""
    sizes, softmax = [], torch.softmax

    def recording(scores, dim):
        sizes.append(scores.numel())
        return softmax(scores, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", recording)
        uncached_logits(model, random_ids(1, length))
    return sizes


@pytest.mark.parametrize("kind", ["hyper", "simplicial"])
def test_windows_bound_the_scores(kind):
    """O(N w1 w2), not O(N^3): a block of queries reaches w - 1 keys further back than it is long, and twice the length
    costs twice."""
    model = random_model(hyper_config(8, kind=kind, windows=[2, 8]))
    shorter, longer = (scores_of(model, blocks * BLOCK) for blocks in (5, 10))
    block = 4 * BLOCK * (BLOCK + 1) * (BLOCK + 7)  # heads, queries, columns of j and of k
    assert max(shorter) == max(longer) == block
    assert sum(longer) - sum(shorter) == 5 * block


def largest_saved_tensor(model, length):
    """Numbers in the largest tensor that the forward pass keeps for the backward, and gradients that are finite."""
    largest = 0

    def pack(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(random_ids(1, length), use_cache=False).logits.square().mean()
    kept = largest
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    return kept


def test_no_scores_are_kept_for_the_backward():
    """Not even those of one query, [1, 4, 1, N, N]; in a single block all of them are. The rest, such as logits, is
    far smaller."""
    model = random_model(hyper_config(num_hidden_layers=1))
    assert largest_saved_tensor(model, BLOCK) >= 4 * BLOCK**3
    assert largest_saved_tensor(model, 2 * BLOCK) < 4 * (2 * BLOCK) ** 2


def test_a_long_linear_input_costs_no_more_per_token(monkeypatch):
    """Running sums: the largest tensor is that of one chunk whatever the length."""
    model = random_model(hyper_config(linear=True))
    sizes, cumsum = [], torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: (sizes.append(x.numel()), cumsum(x, dim))[1])
    for length in (64, 256):
        uncached_logits(model, random_ids(1, length))
    chunk = attention_hyper.CHUNK * 4 * 2 * 8 * 8
    sums = [size for size in sizes if size > 256]
    assert sums == [chunk] * ((64 + 256) // attention_hyper.CHUNK)


# What the papers say of them


@pytest.mark.parametrize("case", ["linear", "linear_order_4"])
@torch.no_grad()
def test_linear_form_decodes_from_a_state_of_constant_size(case):
    """One token at a time, and in chunks: `linear_step` gives what the layer gives for the whole input."""
    attention = random_model(hyper_config(**LINEAR_CASES[case]), dtype=torch.float64).model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    stack = attention.tuple_size
    query = torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64)
    shape = (2, 2 * (1 if attention.sharing else stack), 9, 8)
    key_states, value_states = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "kv")
    expected = attention.attend(query, key_states, value_states, None)[0].transpose(1, 2)
    keys, values = attention.split_keys(key_states), attention.split_keys(value_states)
    for chunks in ([1] * 9, [4, 1, 3, 1]):
        state, outputs = torch.zeros(2, 4, stack, 8, 8, dtype=torch.float64), []
        for n in torch.arange(9).split(chunks):
            output, state = linear_step(
                state, query[:, :, n] * attention.scaling, keys[:, :, :, n], values[:, :, :, n]
            )
            outputs.append(output)
        assert state.shape == (2, 4, stack, 8, 8)
        assert_close(torch.cat(outputs, dim=2), expected, 1e-12)


def test_a_first_token_without_pairs_gives_zero():
    """Under strict order; so the layer passes on its input there."""
    for strict in (True, False):
        model = random_model(hyper_config(strict_order=strict))
        _, output = attention_of_first_layer(model, input_ids=random_ids(2, 5))
        assert bool((output[:, 0] == 0).all()) == strict
        assert (output[:, 1:] != 0).any(dim=-1).all()


@pytest.mark.parametrize("case", ["no_sharing", "strict", "simplicial"])
def test_weights_are_the_shares_of_the_first_key(case):
    model = random_model(hyper_config(3, **CASES[case]))
    model.set_attn_implementation("eager")
    (weights,) = model(random_ids(2, 7), output_attentions=True).attentions
    assert weights.shape == (2, 4, 7, 7)
    assert (weights.triu(1) == 0).all() and (weights.tril(-3) == 0).all()
    totals = torch.ones(2, 4, 7)
    if case == "strict":
        totals[..., 0] = 0
    assert_close(weights.sum(-1), totals, 1e-6)


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, 0),
        ({"sharing": False}, 2 * 1),
        ({"sharing": False, "order": 4, "linear": True}, 2 * 2),
        ({"kind": "simplicial"}, 2 * 1),
    ],
    ids=str,
)
def test_parameter_count(options, extra):
    """With sharing MHA's; without, n - 2 keys and values [G * head_dim, hidden_size] more."""
    mha = random_model(small_config(attention_kinds="mha", num_hidden_layers=1)).num_parameters()
    assert random_model(hyper_config(**options)).num_parameters() - mha == extra * 16 * 32


@pytest.mark.parametrize(
    ("preset", "extra"),
    [("", 0), ("-hyper-feature", 0), ("-hyper-feature-v2", 0), ("-hyper", 0), ("-hyper-no-sharing", 12 * 2 * 768**2)],
)
def test_presets_have_the_size_of_gpt3_small(preset, extra):
    """12 * (4 * 768^2 + 2 * 768 * 3072) + 50257 * 768 in matrices (its 125M count learned positions and biases, too),
    and the norms; HyperAttention without sharing has a second key and value."""
    config = IHAConfig.from_preset(f"gpt3-small{preset}")
    with torch.device("meta"):
        model = IHAForCausalLM(config)
    assert model.num_parameters() == 123_532_032 + 25 * 768 + extra


# Use


@pytest.mark.parametrize("case", ["no_sharing", "strict", "simplicial", "linear_order_4"])
def test_overfits_a_batch(case):
    torch.manual_seed(0)
    model = random_model(hyper_config(num_hidden_layers=2, **{**CASES, **LINEAR_CASES}[case])).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert learn_one_batch(model, optimizer) < 0.05


@pytest.mark.parametrize("case", ["no_sharing", "simplicial"])
def test_round_trip(case, tmp_path):
    model = random_model(hyper_config(3, windows=[3, 2], **CASES[case]))
    loaded = reload(model, tmp_path)
    assert loaded.config.attention_options == model.config.attention_options
    assert torch.equal(uncached_logits(loaded, random_ids(2, 9)), uncached_logits(model, random_ids(2, 9)))


KINDS = ["hyper_feature", "hyper", "hyper_linear", "simplicial"]


@pytest.mark.parametrize("how", ["loaded", "autocast"])
@pytest.mark.parametrize("dtype", LOGITS, ids=str)
@pytest.mark.parametrize("geometry", KINDS)
def test_half_precision(geometry, dtype, how):
    """Logits near those in float32, and gradients that are finite: loaded in the dtype, and float32 weights under
    autocast."""
    config, input_ids = small_config(use_qk_norm=True, **GEOMETRIES[geometry]), random_ids(2, 24)
    expected = uncached_logits(random_model(config), input_ids)
    model = random_model(config, dtype=dtype if how == "loaded" else torch.float32)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        output = model(input_ids, labels=input_ids, use_cache=False)
    assert output.logits.dtype == dtype
    assert_close(output.logits.detach().float(), expected, LOGITS[dtype])
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("geometry", KINDS)
def test_adapters_train_come_back_and_merge(geometry, tmp_path):
    """LoRA on the projections, of which some are wider than Llama's."""
    config, input_ids = small_config(**GEOMETRIES[geometry]), random_ids(2, 9)
    base = random_model(config)
    expected = uncached_logits(base, input_ids)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(
        random_model(config), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
    )
    model(input_ids, labels=input_ids).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
    adapted = uncached_logits(model.eval(), input_ids)
    assert (adapted - expected).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    assert torch.equal(uncached_logits(PeftModel.from_pretrained(base, tmp_path), input_ids), adapted)
    assert_close(uncached_logits(model.merge_and_unload(), input_ids), adapted)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": 1}, "order=1; it must be a whole number, at least 2"),
        ({"order": 4}, "order=4 with softmax, which is for order 3 only: set linear=True"),
        ({"order": 2}, "order=2 with softmax"),
        ({"linear": True, "strict_order": True}, "linear=True.*strict_order must not be set"),
        ({"linear": True, "windows": [2, 3], "window": 3}, "linear=True.*windows must not be set"),
        ({"linear": True, "window": 3}, "linear=True.*must be 'full_attention'"),
        ({"windows": [2, 3]}, r"windows=\[2, 3\]; its layers must be 'sliding_attention', with sliding_window=3"),
        ({"windows": [2, 3], "window": 4}, r"windows=\[2, 3\].*sliding_window=3"),
        ({"strict_order": True, "window": 1}, "strict_order=True with a window of 1 token for k"),
        ({"strict_order": True, "windows": [3, 1], "window": 3}, "strict_order=True with a window of 1 token for k"),
        ({"windows": [3], "window": 3}, r"windows=\[3\]; it must be a list of two"),
        ({"windows": [0, 3], "window": 3}, r"windows=\[0, 3\]; it must be a list of two"),
        ({"sharing": None}, "sharing=None; it must be true or false"),
        ({"kind": "simplicial", "sharing": True}, "the option 'sharing'; options of this kind: 'windows'"),
        ({"kind": "simplicial", "windows": [2, 3]}, r"windows=\[2, 3\]; its layers"),
    ],
    ids=str,
)
def test_bad_options_are_refused(fields, message):
    kind = fields.get("kind", "hyper")
    with pytest.raises(Exception, match=rf"attention_options\['{kind}'\] has {message}"):
        hyper_config(**fields)
