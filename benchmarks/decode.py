"""Measure the time that one attention layer (width 512, 8 heads) takes for one new token after N cached ones.

Two forms read a cache of base keys and values: "absorbed", the model's own, and "remixing", which rebuilds the virtual
tokens for SDPA. Two forms read a cache of virtual keys and values, which is P times as large: "pseudo cache, SDPA",
and "pseudo cache, eager" with two matrix products and a float32 softmax. All start from the same tokens, and the
command compares their outputs. It also gives the bytes cached for a token, over those of Llama.

example: python -m benchmarks.decode --tokens 512 2048 8192 --pseudo-heads 2 4
"""

from collections.abc import Callable
from itertools import product

import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from benchmarks.harness import Attention, arguments, draw, medians, ratios, reported, span, write
from kinds.model_cost import attention
from modeling_iha.interleaving import collapse, expand


BASE_CACHES = ("absorbed", "remixing")
PSEUDO_CACHES = ("pseudo cache, SDPA", "pseudo cache, eager")
BETTER = "better pseudo cache"
# Errors are relative to the norm of the output. In bfloat16 each form rounds at different places.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def cache_of(keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    cache.update(keys, values, 0)
    return cache


def one_token(step: Callable, hidden_states: torch.Tensor, cache: Cache) -> Callable[[], torch.Tensor]:
    """Return a decoding step that leaves the cache as it was."""
    length = cache.get_seq_length()

    def run() -> torch.Tensor:
        output = step(hidden_states)
        cache.crop(length - cache.get_seq_length())
        return output

    return run


def layer_forms(tokens: int, virtual: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the forms, each a decoding step that returns the layer's output [1, 1, 512]."""
    forms = dict(zip(BASE_CACHES, ("base", "virtual"), strict=True))
    readers = {name: Attention(form, dtype, num_pseudo_heads=virtual) for name, form in forms.items()}
    absorbed = readers["absorbed"]
    for reader in readers.values():
        reader.load_state_dict(absorbed.state_dict())
    layer = absorbed.model.layers[0].self_attn
    keys, values = torch.randn(2, 1, 8, tokens, 64, dtype=dtype)
    hidden_states = torch.randn(1, 1, 512, dtype=dtype)
    tables = absorbed.model.rotary_emb.tables(hidden_states, torch.tensor([[tokens]]))

    def expand_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rotation = tables["pseudo_head"]
        query, key = (
            expand(states, mixing.weight, rotation) for states, mixing in ((query, layer.q_mix), (key, layer.k_mix))
        )
        return query, key, expand(value, layer.v_mix.weight, None)

    hidden = torch.full((virtual, virtual), -torch.inf, dtype=dtype).triu(1)
    mask = torch.cat((hidden.new_zeros(virtual, tokens * virtual), hidden), dim=1)[None, None]

    def pseudo_cache_step(core: Callable) -> Callable:
        def step(hidden_states: torch.Tensor) -> torch.Tensor:
            query, key, value = expand_all(*layer.project(hidden_states, tables, None))
            key, value = pseudo_cache.update(key, value, 0)
            output, _ = core(layer, query, key, value, mask, scaling=layer.scaling)
            return layer.o_proj(collapse(output, layer.collapse.weight, virtual).reshape(1, 1, -1))

        return step

    _, virtual_keys, virtual_values = expand_all(keys, keys, values)
    pseudo_cache = cache_of(virtual_keys.contiguous(), virtual_values.contiguous())
    base_cache = cache_of(keys, values)
    steps = {name: (form.attend(hidden_states, base_cache), base_cache) for name, form in readers.items()}
    for name, core in zip(PSEUDO_CACHES, (sdpa_attention_forward, eager_attention_forward), strict=True):
        steps[name] = (pseudo_cache_step(core), pseudo_cache)
    return {name: one_token(step, hidden_states, cache) for name, (step, cache) in steps.items()}


@torch.no_grad()
def agreeing_forms(tokens: int, virtual: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Return `layer_forms`, or raise a RuntimeError where two outputs differ."""
    forms = layer_forms(tokens, virtual, dtype)
    outputs = {name: step().float() for name, step in forms.items()}
    for name, output in outputs.items():
        difference = ((output - outputs["absorbed"]).norm() / outputs["absorbed"].norm()).item()
        if not difference <= TOLERANCE[dtype]:
            raise RuntimeError(f"{name} and absorbed differ by {difference:.1%} at {tokens} tokens: a form is wrong.")
    return forms


@torch.no_grad()
def measure_layer(tokens: int, virtual: int, dtype: torch.dtype, repeats: int) -> dict:
    forms = agreeing_forms(tokens, virtual, dtype)
    seconds = medians(forms, repeats)
    seconds[BETTER] = min(seconds[name] for name in PSEUDO_CACHES)
    bytes_read = {"absorbed": 1, BETTER: virtual}
    return {
        "part": "layer",
        "tokens": tokens,
        "pseudo_heads": virtual,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": seconds,
        "ratios": ratios(seconds, BETTER),
        "predicted": ratios(bytes_read, BETTER),
    }


def cache_bytes(model: torch.nn.Module, tokens: int = 64) -> float:
    """Return the bytes that a forward pass caches for each token."""
    cache = DynamicCache()
    with torch.no_grad():
        model(inputs_embeds=torch.randn(1, tokens, model.config.hidden_size), past_key_values=cache)
    return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values)) / tokens


def measure_cache(virtual: int) -> dict:
    iha = Attention(num_pseudo_heads=virtual).model
    sizes = {name: getattr(iha.config, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}
    llama = LlamaModel(LlamaConfig(**sizes, intermediate_size=8, vocab_size=256))
    measured = {"iha": cache_bytes(iha), "llama": cache_bytes(llama)}
    model = {kind: attention(iha.config, kind, "full_attention", 64).cache for kind in ("iha", "mha")}
    predicted = {"iha / llama": model["iha"] / model["mha"]}
    row = {"part": "cache", "pseudo_heads": virtual, "cache_bytes_per_token": measured, "seconds": {}}
    return {**row, "ratios": ratios(measured, "llama"), "predicted": predicted}


def plot(table: dict) -> Figure:
    """Plot the time of a token in each form."""
    layers = [row for row in table["rows"] if row["part"] == "layer"]
    found = span(row["ratios"][f"absorbed / {BETTER}"] for row in layers)
    message = f"A token from the base cache takes {found} of the time of one from the better cache of virtual keys"

    def panel(dtype: str) -> Callable:
        return lambda row: {
            f"{name}, P = {row['pseudo_heads']}": value
            for name, value in row["seconds"].items()
            if row["dtype"] == dtype and name != BETTER
        }

    panels = {f"seconds for a token, {dtype} (lower is better)": panel(dtype) for dtype in ("bfloat16", "float32")}
    return draw(message, {**table, "rows": layers}, panels)


def main() -> None:
    parser = arguments(__doc__, [512, 2048, 8192], repeats=15)
    parser.add_argument("--pseudo-heads", type=int, nargs="+", default=[2, 4], help="numbers of pseudo-heads ([2, 4])")
    args = parser.parse_args()
    rows = reported(measure_cache(virtual) for virtual in args.pseudo_heads)
    rows += reported(
        measure_layer(tokens, virtual, dtype, args.repeats)
        for dtype, tokens, virtual in product((torch.bfloat16, torch.float32), args.tokens, args.pseudo_heads)
    )

    write(args.out, "decode", rows, plot, predicted_by="bytes of cache that are read")


if __name__ == "__main__":
    main()
