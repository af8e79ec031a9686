"""The Triton kernels against their definition in plain float64 torch. test_triton.py runs this, on a GPU or in
Triton's interpreter, in a process of its own: Triton is told which when it is imported."""

import pytest
import torch
import triton
from helpers import HYBRID, random_ids, random_model, set_core, small_config
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from benchmarks.decode import BASE_CACHES, PSEUDO_CACHES, agreeing_forms
from gpu_kernels import decode_triton
from gpu_kernels import fused_triton as triton_kernels
from gpu_kernels.attention import attention
from gpu_kernels.decode_triton import decode_attention
from gpu_kernels.fused_triton import fused_attention, mix_rotate
from modeling_iha.attention_iha import mix
from modeling_iha.collapse_first import IHAWeights


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest entry, or to 0.1 where gradients vanish (a query that sees one key). float32 rounds to 6e-8
# and sums of at most some hundred terms lose a digit or two; float16 rounds tiles, weights and gradients to 5e-4.
ERRORS = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
HALVES = [torch.bfloat16] if DEVICE == "cuda" else []
# Heads of 128 float32 numbers fit no multiprocessor.
REAL = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@pytest.fixture(autouse=True, scope="module")
def range_in_the_interpreter():
    """Triton 3.6 keeps scalars as arrays of one entry, from which NumPy 2.4 makes no bound of a `range`."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of queries and keys in a short sequence."""
    for tile in ("QUERY_TILE", "KEY_TILE"):
        monkeypatch.setattr(triton_kernels, tile, (32, 32))
    monkeypatch.setattr(triton_kernels, "PASSING_TILES", ((32, 32),) * 2)


@pytest.fixture
def few_programs(monkeypatch):
    """Several steps and several splits of a short cache."""
    monkeypatch.setattr(decode_triton, "KEYS", 16)
    monkeypatch.setattr(decode_triton, "PROGRAMS", 4)


def draw(*shape, seed):
    """float64 noise that every dtype of ERRORS represents."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise.bfloat16().double()


def rotation_tables(num_pseudo_heads, head_dim):
    """cos and sin [P, head_dim / 2], float64, of RoPE's base 10 at 0..P-1."""
    angles = torch.arange(num_pseudo_heads)[:, None] * 10.0 ** (
        -torch.arange(head_dim // 2).double() / (head_dim // 2)
    )
    return angles.cos(), angles.sin()


def plain_mix_rotate(states, alpha, rotation):
    mixed = torch.einsum("mhp,bmnd->bnphd", alpha, states)
    if rotation is None:
        return mixed
    cos, sin = (table[:, None] for table in rotation)
    x1, x2 = mixed.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def plain_attention(q, k, v, alpha_q, alpha_k, alpha_v, collapse, rotation, scaling, window, documents):
    batch, num_heads, length, _ = q.shape
    num_pseudo_heads = collapse.shape[1]
    queries = plain_mix_rotate(q, alpha_q, rotation).flatten(1, 2)
    keys = plain_mix_rotate(k, alpha_k, rotation).flatten(1, 2).repeat_interleave(num_heads // k.shape[1], dim=2)
    values = plain_mix_rotate(v, alpha_v, None).flatten(1, 2).repeat_interleave(num_heads // k.shape[1], dim=2)
    position = torch.arange(length * num_pseudo_heads)
    distance = position[:, None] - position
    visible = (distance >= 0).expand(batch, -1, -1)
    if window is not None:
        visible = visible & (distance < window * num_pseudo_heads)
    if documents is not None:
        document = documents.repeat_interleave(num_pseudo_heads, dim=1)
        visible = visible & (document[:, :, None] == document[:, None, :])
    scores = scaling * torch.einsum("bvhd,buhd->bhvu", queries, keys)
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1)
    heads = torch.einsum("bhvu,buhd->bvhd", weights, values).unflatten(1, (length, num_pseudo_heads))
    return torch.einsum("hp,bnphd->bnhd", collapse, heads)


def assert_same(actual, expected, dtype, what):
    assert actual.isfinite().all(), what
    error = ((actual.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()
    assert error <= ERRORS[dtype], f"{what}: {error:.1e}"


def compare(kernel, plain, inputs, dtype, **options):
    """Output and gradients of all inputs, at a random gradient of the output."""
    expected_inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    actual_inputs = {name: x.to(DEVICE, dtype).requires_grad_() for name, x in inputs.items()}
    expected = plain(**expected_inputs, **options)
    on_device = {
        name: tuple(table.to(DEVICE, torch.float32) for table in option) if isinstance(option, tuple) else option
        for name, option in options.items()
    }
    if on_device.get("documents") is not None:
        on_device["documents"] = on_device["documents"].to(DEVICE)
    actual = kernel(**actual_inputs, **on_device)
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert_same(actual, expected, dtype, "output")
    gradient = draw(*expected.shape, seed=100)
    expected.backward(gradient)
    actual.backward(gradient.to(DEVICE, dtype))
    for name, x in actual_inputs.items():
        assert x.grad.dtype == dtype
        assert_same(x.grad, expected_inputs[name].grad, dtype, f"gradient of {name}")


@pytest.mark.parametrize(
    "heads,pseudo,length,head_dim,rotated,dtype",
    [
        (1, 1, 1, 4, True, torch.float32),
        (3, 1, 37, 16, True, torch.float32),
        (4, 2, 19, 8, True, torch.float32),
        (4, 2, 19, 8, False, torch.float32),
        (2, 3, 9, 40, True, torch.float32),
        (2, 4, 12, 32, True, torch.float16),
        # More heads than one product takes.
        (17, 2, 3, 8, True, torch.float32),
        *((3, 3, 9, 6, True, dtype) for dtype in HALVES),
    ],
)
def test_mix_rotate(small_tiles, heads, pseudo, length, head_dim, rotated, dtype):
    inputs = {"states": draw(2, heads, length, head_dim, seed=1), "alpha": draw(heads, heads, pseudo, seed=2)}
    rotation = rotation_tables(pseudo, head_dim) if rotated else None
    compare(mix_rotate, plain_mix_rotate, inputs, dtype, rotation=rotation)


def attention_inputs(batch=1, heads=2, groups=2, pseudo=2, length=19, head_dim=8):
    return {
        "q": draw(batch, heads, length, head_dim, seed=1),
        "k": draw(batch, groups, length, head_dim, seed=2),
        "v": draw(batch, groups, length, head_dim, seed=3),
        "alpha_q": draw(heads, heads, pseudo, seed=4),
        "alpha_k": draw(groups, groups, pseudo, seed=5),
        "alpha_v": draw(groups, groups, pseudo, seed=6),
        "collapse": draw(heads, pseudo, seed=7),
    }


def fused(q, k, v, alpha_q, alpha_k, alpha_v, collapse, rotation, scaling, window=None, documents=None):
    return fused_attention(
        q, k, v, IHAWeights(alpha_q, alpha_k, alpha_v, collapse, rotation), scaling, window, documents
    )


def compare_attention(dtype=torch.float32, rotated=True, window=None, documents=None, **sizes):
    inputs = attention_inputs(**sizes)
    pseudo, head_dim = inputs["collapse"].shape[1], inputs["q"].shape[-1]
    rotation = rotation_tables(pseudo, head_dim) if rotated else None
    options = {"rotation": rotation, "scaling": 0.4 * head_dim**-0.5, "window": window, "documents": documents}
    compare(fused, plain_attention, inputs, dtype, **options)


@pytest.mark.parametrize(
    "sizes",
    [
        {"pseudo": 1, "length": 1, "batch": 2},
        {"pseudo": 1, "length": 35, "heads": 4},
        {"pseudo": 2, "heads": 3, "groups": 1, "head_dim": 6},
        {"pseudo": 2, "rotated": False},
        {"pseudo": 3, "head_dim": 40, "length": 18, "batch": 2},
        {"pseudo": 4, "heads": 4, "groups": 2},
        {"pseudo": 5, "length": 7, "rotated": False},
        {"pseudo": 1, "length": 2, "heads": 17, "groups": 17},
    ],
    ids=str,
)
def test_attention(small_tiles, sizes):
    compare_attention(**sizes)


@pytest.mark.parametrize("pseudo,head_dim", [(1, 64), (2, 128), (3, 128), (8, 64), (9, 64), (20, 64), (32, 128)])
def test_attention_of_a_real_model(pseudo, head_dim):
    """Its numbers of pseudo-heads and its heads, two to a group: packed documents, and left padding."""
    documents = torch.tensor([[0, 0, 1, 1, 1], [-1, -1, 0, 0, 0]], dtype=torch.int32)
    sizes = {"batch": 2, "heads": 2, "groups": 1, "length": 5}
    compare_attention(REAL, pseudo=pseudo, head_dim=head_dim, documents=documents, **sizes)


@pytest.mark.parametrize("pseudo,head_dim", [(2, 64), (32, 128)])
def test_one_token(pseudo, head_dim):
    compare_attention(REAL, pseudo=pseudo, head_dim=head_dim, length=1, heads=2, groups=1)


@pytest.mark.parametrize("window", [None, 1, 2, 30])
def test_attention_in_chunks(small_tiles, window):
    """Of pseudo-heads, of which the last is not full."""
    compare_attention(heads=1, groups=1, pseudo=9, length=4, head_dim=6, window=window)


def test_attention_in_the_tiles_of_a_gpu():
    compare_attention(heads=1, groups=1, length=40, head_dim=64)


@pytest.mark.parametrize(
    "pseudo,length,window", [(1, 35, 1), (1, 35, 3), (1, 35, 34), (3, 19, 1), (3, 19, 2), (3, 19, 9), (3, 19, 10**9)]
)
def test_window(small_tiles, pseudo, length, window):
    compare_attention(pseudo=pseudo, length=length, window=window)


DOCUMENTS = {
    "packed": torch.tensor([[0] * 5 + [1] * 12 + [2] * 2, [0] + [1] * 17 + [2]], dtype=torch.int32),
    "padded": torch.tensor([[-1] * 10 + [0] * 9, [0] * 17 + [-1] * 2], dtype=torch.int32),
}


@pytest.mark.parametrize("documents,window", [("packed", None), ("packed", 4), ("padded", None)])
def test_documents(small_tiles, documents, window):
    compare_attention(batch=2, heads=1, groups=1, pseudo=3, window=window, documents=DOCUMENTS[documents])


@pytest.mark.parametrize("dtype", [torch.float16, *HALVES], ids=str)
def test_attention_in_half_precision(small_tiles, dtype):
    compare_attention(dtype, pseudo=2)
    compare_attention(dtype, pseudo=3, window=5, head_dim=16)


@pytest.mark.parametrize("pseudo", [1, 8, 9, 20, 32])
@pytest.mark.parametrize("dtype", [torch.float16, *HALVES], ids=str)
def test_a_real_model_in_half_precision(dtype, pseudo):
    compare_attention(dtype, pseudo=pseudo, heads=2, groups=1, head_dim=64, length=5)


def test_tensors_of_any_strides(small_tiles):
    inputs = attention_inputs(batch=2, groups=1)
    strided = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items()}
    rotation = tuple(table.T.contiguous().T for table in rotation_tables(2, 8))
    documents = torch.tensor([[0] * 10 + [1] * 9], dtype=torch.int32).expand(2, -1)
    options = {"rotation": rotation, "scaling": 0.1, "window": None, "documents": documents}
    compare(fused, plain_attention, strided, torch.float32, **options)
    mix_inputs = {"states": strided["q"], "alpha": strided["alpha_q"]}
    compare(mix_rotate, plain_mix_rotate, mix_inputs, torch.float32, rotation=rotation)


def test_nothing_as_large_as_the_virtual_tokens_is_allocated(small_tiles):
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.nbytes)
            return result

    inputs = {name: x.float().to(DEVICE).requires_grad_() for name, x in attention_inputs(pseudo=4).items()}
    with Sizes() as sizes:
        fused(**inputs, rotation=None, scaling=1.0).sum().backward()
    assert sizes.largest == inputs["q"].nbytes


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"v": torch.zeros(1, 2, 19, 8, dtype=torch.float64)}, "q must be float32, float16 or bfloat16"),
        ({"k": torch.zeros(1, 2, 18, 8)}, r"k must have the shape \[1, 2, 19, 8\], not \[1, 2, 18, 8\]"),
        ({"alpha_v": torch.zeros(2, 2, 3)}, r"alpha_v must have the shape \[2, 2, 2\]"),
        ({"collapse": torch.zeros(2, 4)}, r"collapse must have the shape \[2, 2\]"),
        ({"rotation": (torch.zeros(2, 4), torch.zeros(2, 8))}, r"sin must have the shape \[2, 4\]"),
        ({"documents": torch.zeros(19, dtype=torch.int32)}, r"documents must have the shape \[1, 19\]"),
        ({"window": 0}, "window must be at least 1 token, not 0"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_refusals(changes, message):
    arguments = {name: x.float() for name, x in attention_inputs().items()} | {"rotation": None, "scaling": 1.0}
    arguments = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in (arguments | changes).items()}
    with pytest.raises(ValueError, match=message):
        fused(**arguments)


def test_head_dim_and_groups_are_refused():
    inputs = {name: x.float().to(DEVICE) for name, x in attention_inputs(head_dim=7).items()}
    with pytest.raises(ValueError, match="head_dim must be even, but q has 7"):
        fused(**inputs, rotation=None, scaling=1.0)
    inputs = {name: x.float().to(DEVICE) for name, x in attention_inputs(heads=3, groups=2).items()}
    with pytest.raises(ValueError, match="must divide those of q, but there are 2 and 3"):
        fused(**inputs, rotation=None, scaling=1.0)


def test_rotated_states_under_autocast():
    """They are float32 while the values are not: the products are in the values' dtype."""
    inputs = {name: x.float().to(DEVICE) for name, x in attention_inputs().items()}
    inputs["v"] = inputs["v"].half()
    output = fused(**inputs, rotation=None, scaling=0.3)
    inputs |= {"q": inputs["q"].half(), "k": inputs["k"].half()}
    assert output.dtype == torch.float16 and torch.equal(output, fused(**inputs, rotation=None, scaling=0.3))


@pytest.mark.skipif(DEVICE == "cuda", reason="about the interpreter")
def test_bfloat16_products_are_refused_by_the_interpreter():
    inputs = {name: x.bfloat16() for name, x in attention_inputs().items()}
    with pytest.raises(ValueError, match="multiplies the bits of bfloat16 as integers"):
        fused(**inputs, rotation=None, scaling=1.0)
    with pytest.raises(ValueError, match="multiplies the bits of bfloat16 as integers"):
        mix_rotate(inputs["q"], inputs["alpha_q"])


def compare_decoding(dtype=torch.float32, rotated=True, window=None, documents=None, **sizes):
    """The last token of whole inputs."""
    inputs = attention_inputs(**sizes)
    pseudo, head_dim = inputs["collapse"].shape[1], inputs["q"].shape[-1]
    rotation = rotation_tables(pseudo, head_dim) if rotated else None
    scaling = 0.4 * head_dim**-0.5
    expected = plain_attention(**inputs, rotation=rotation, scaling=scaling, window=window, documents=documents)
    q, k, v, *mixing = (x.to(DEVICE, dtype) for x in inputs.values())
    tables = rotation and tuple(table.float().to(DEVICE) for table in rotation)
    documents = documents if documents is None else documents.to(DEVICE)
    output = decode_attention(q[:, :, -1:], k, v, IHAWeights(*mixing, tables), scaling, window, documents)
    assert output.dtype == dtype and output.shape == expected[:, -1:].shape
    assert_same(output, expected[:, -1:], dtype, "output")


@pytest.mark.parametrize(
    "sizes",
    [
        {"pseudo": 1, "length": 1, "batch": 2},
        {"pseudo": 1, "length": 35, "heads": 4},
        {"pseudo": 2, "heads": 3, "groups": 1, "head_dim": 6},
        {"pseudo": 3, "heads": 4, "groups": 2, "length": 70},
        {"pseudo": 4, "rotated": False},
        {"pseudo": 9, "heads": 9, "groups": 3, "head_dim": 64, "length": 5},
        {"pseudo": 2, "heads": 34, "groups": 17, "length": 3},
    ],
    ids=str,
)
def test_decoding(few_programs, sizes):
    compare_decoding(**sizes)


@pytest.mark.parametrize("pseudo,head_dim", [(1, 64), (2, 128), (8, 64), (20, 128), (32, 64)])
def test_decoding_of_a_real_model(pseudo, head_dim):
    compare_decoding(REAL, heads=6, groups=2, pseudo=pseudo, head_dim=head_dim, length=70)


@pytest.mark.parametrize("window", [1, 2, 17, 18, 19, 10**9])
def test_decoding_in_a_window(few_programs, window):
    compare_decoding(pseudo=3, window=window)


@pytest.mark.parametrize("documents,window", [("packed", None), ("packed", 4), ("padded", None)])
def test_decoding_in_documents(few_programs, documents, window):
    """In the last row only the new token's own document, or nothing but padding, is left."""
    compare_decoding(batch=2, heads=4, groups=2, window=window, documents=DOCUMENTS[documents])


@pytest.mark.parametrize("dtype", [torch.float16, *HALVES], ids=str)
def test_decoding_in_half_precision(few_programs, dtype):
    compare_decoding(dtype, pseudo=4, heads=4, head_dim=64)
    compare_decoding(dtype, pseudo=3, window=5, head_dim=16)


def test_decoding_in_the_benchmark():
    """Against the other forms of `make gpu SLICE=decode`."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    forms = agreeing_forms(70, 2, dtype, batch=2, device=DEVICE, fused=attention)
    assert forms.keys() == {*BASE_CACHES, "fused", *PSEUDO_CACHES}


@pytest.mark.parametrize("pseudo_positions", ["interleaved", "shared"])
def test_layer(small_tiles, pseudo_positions):
    """The layer's own weights and tables mean the same to the kernels."""
    model = random_model(small_config(num_pseudo_heads=3, pseudo_positions=pseudo_positions)).to(DEVICE).model
    layer = model.layers[0].self_attn
    hidden_states = draw(1, 19, 32, seed=1).float().to(DEVICE)
    tables = model.rotary_emb.tables(hidden_states, torch.arange(19, device=DEVICE)[None])
    with torch.no_grad():
        expected, _ = layer(hidden_states, tables)
        states = layer.project(hidden_states, tables, None)
        weights = IHAWeights(
            *(getattr(layer, name).weight for name in layer.mixing_modules), tables.get("pseudo_head")
        )
        heads = fused_attention(*states, weights, layer.scaling)
        assert_same(layer.o_proj(heads.flatten(2)), expected.double().cpu(), torch.float32, "layer")
        mixed = layer.rotate_pseudo_heads(mix(states[0], weights.q_mix), weights.rotation)
        rotated = mix_rotate(states[0], layer.q_mix.weight, tables.get("pseudo_head"))
        assert_same(rotated, mixed.double().cpu(), torch.float32, "virtual queries")


@pytest.mark.parametrize(
    "overrides", [HYBRID | {"sliding_window": 3}, {"num_pseudo_heads": 3, "pseudo_positions": "shared"}], ids=str
)
def test_model_on_fused_triton(overrides, monkeypatch):
    """The model on the fused kernels against eager: logits and gradients with left padding, then a chunk and a token
    on the cache."""
    results, decoded = {}, []

    def decode(*arguments):
        decoded.append(arguments)
        return decode_attention(*arguments)

    monkeypatch.setattr("gpu_kernels.attention.decode_attention", decode)
    input_ids = random_ids(2, 9).to(DEVICE)
    mask = torch.ones(2, 9, dtype=torch.long, device=DEVICE)
    mask[0, :2] = 0
    for core in ("eager", "fused_triton"):
        model = random_model(small_config(**overrides)).to(DEVICE)
        set_core(model, "eager" if core == "eager" else "sdpa")
        if core == "fused_triton":
            model.model.attention_form = attention
        logits = model(input_ids, attention_mask=mask).logits * mask[..., None]
        logits.square().sum().backward()
        chunks, cache = [], None
        with torch.no_grad():
            for chunk in input_ids.split([5, 3, 1], dim=1):
                output = model(chunk, past_key_values=cache, use_cache=True)
                chunks.append(output.logits)
                cache = output.past_key_values
        gradients = [parameter.grad for parameter in model.parameters()]
        results[core] = [logits.detach(), torch.cat(chunks, dim=1), *gradients]
    for actual, expected in zip(results["fused_triton"], results["eager"], strict=True):
        assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert decoded
