"""Write one interactive HTML page of what the heads of a checkpoint do with a prompt.

For every head of every layer the page shows the attention patterns token by token, for an "iha" layer all P^2 of them
(query pseudo-head by key pseudo-head), with its mixing matrices, its collapse, and how far these are from where they
start. Of "diff" it shows both softmaxes, of "hyper" and "simplicial" the shares of the first token of a pair, and of a
layer that returns no weights, such as linear "hyper", that it has none. `--compare` adds a second checkpoint of the
same shape, for example MODEL after fine-tuning, and the differences. The page is one file that needs no network, with
Plotly inside, and stays under 10 MB.

example: python -m research.experiments.explore_attention smollm2-iha "The cat sat" --compare smollm2-iha-tuned
"""

import argparse
import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from iha_io.command_io import UserError, check_output_file, run_cli, whole_file


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="checkpoint: a directory, a Hub id or a GGUF file")
    parser.add_argument("prompt", help="text to look at")
    parser.add_argument("--compare", metavar="OTHER", help="a checkpoint of the same shape to compare MODEL with")
    parser.add_argument("--layers", type=int, nargs="+", help="layers to show, from 0 (default: all)")
    parser.add_argument("--output", type=Path, default=Path("outputs/attention.html"), help="page to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from iha_io.checkpoint_io import check_finite, load_config, load_model, load_tokenizer
from kind_facts import described
from model_cards.render import source_name
from modeling_iha.interleave import identity_mixing, last_pseudo_head


TEMPLATE = Path(__file__).with_suffix(".html")
# Bytes that weights may take before base64: with it they are 7.4 MB, and Plotly is 2.0 MB.
MAX_BYTES = 5_500_000
# Bytes of a number of a mixing matrix, written in 4 digits and compressed.
BYTES_PER_NUMBER = 4
# More tokens have no room on an axis.
MAX_TOKENS = 256


class LayerShape(NamedTuple):
    """Hold what two checkpoints must have in common in a layer."""

    heads: int  # maps of the layer: a "diff_v2" layer has two for each head
    groups: int
    pseudo_heads: int | None  # P of an "iha" layer
    collapse: str | None

    def size(self, tokens: int) -> int:
        """Return the bytes of the layer in the page before base64, if only the zeros above the diagonal compress."""
        virtual = tokens * (self.pseudo_heads or 1)
        numbers = 0
        if self.pseudo_heads:
            columns = self.heads if self.collapse == "all_heads" else 1
            numbers = (self.heads**2 + 2 * self.groups**2 + self.heads * columns) * self.pseudo_heads
        return self.heads * virtual * (virtual + 1) // 2 + BYTES_PER_NUMBER * numbers


def layer_shapes(config: PreTrainedConfig, layers: list[int]) -> list[LayerShape]:
    """Return the shapes of `layers` of a model."""
    config = described(config)
    heads, kinds = config.num_attention_heads, config.attention_kinds
    iha = (config.num_pseudo_heads, config.pseudo_collapse) if "iha" in kinds else ()
    return [
        LayerShape(
            heads * (1 + (kinds[i] == "diff_v2")),
            config.num_key_value_heads,
            *(iha if kinds[i] == "iha" else (None, None)),
        )
        for i in layers
    ]


def token_limit(shapes: list[LayerShape]) -> int:
    """Return the most tokens that the page has room for with these layers, those of both checkpoints."""
    fits = (n for n in range(MAX_TOKENS, 0, -1) if sum(shape.size(n) for shape in shapes) <= MAX_BYTES)
    return next(fits, 0)


def token_labels(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return each token as a reader knows it: its text with white space made visible.

    A token that is no whole character has the vocabulary's spelling.
    """
    labels = []
    for token in ids:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        spelled = tokenizer.convert_ids_to_tokens(token) if not text or "\ufffd" in text else text
        labels.append(spelled.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣"))
    return labels


def mixing(attention: torch.nn.Module, shape: LayerShape) -> dict[str, torch.Tensor]:
    """Return the mixing matrices [source head, head, P] and the collapse [H, P or H * P] of an "iha" layer."""
    if shape.pseudo_heads is None:
        return {}
    return {name: attention.get_submodule(name).value().detach() for name in ("q_mix", "k_mix", "v_mix", "collapse")}


def starts(shape: LayerShape) -> dict[str, dict[str, torch.Tensor]]:
    """Return where the matrices of `mixing` start, by the name of the start.

    A conversion makes the collapse select the last pseudo-head. A new model takes the mean.
    """
    heads, p = shape.heads, shape.pseudo_heads
    last = last_pseudo_head(heads, p, shape.collapse)
    mean = sum(last.roll(-i, dims=1) for i in range(p)) / p
    return {
        "q_mix": {"identity": identity_mixing(heads, p)},
        "k_mix": {"identity": identity_mixing(shape.groups, p)},
        "v_mix": {"identity": identity_mixing(shape.groups, p)},
        "collapse": {"last pseudo-head": last, "mean": mean},
    }


def numbers(tensor: torch.Tensor) -> list:
    """Return the entries of a tensor as nested lists, with 4 digits."""
    if tensor.ndim == 0:
        return float(f"{tensor.item():.4g}")
    return [numbers(part) for part in tensor]


def quantise(weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the weights as 8-bit codes of their square roots, which keep small weights apart, and the largest.

    A code c stands for the largest times (c / 255)^2, or sign(c) (c / 127)^2 where some weight is negative.
    """
    largest = weights.abs().max().item() or 1.0
    roots = (weights.abs() / largest).sqrt() * weights.sign()
    if (weights < 0).any():
        return (roots * 127).round().to(torch.int8), largest
    return (roots * 255).round().to(torch.uint8), largest


class Recorded(NamedTuple):
    """Hold what a checkpoint does with the prompt, for each of the chosen layers."""

    attentions: list[torch.Tensor | None]  # [H, N * P, N * P]; `None` where a layer returns no weights
    mixing: list[dict[str, torch.Tensor]]


@torch.no_grad()
def record(source: str, ids: list[int], layers: list[int]) -> Recorded:
    """Run the checkpoint on the tokens. Raise `UserError`."""
    print(f"Reading {source}", flush=True)
    model = load_model(source, torch.float32)
    model.set_attn_implementation("eager")
    modules = [model.base_model.layers[layer].self_attn for layer in layers]
    seen = {}
    for module in modules:
        module.register_forward_hook(lambda module, args, output: seen.update({module: output[1]}))
    # `output_attentions` would leave out the layers without weights, and not say which.
    model(torch.tensor([ids]), use_cache=False)
    attentions = [None if seen[module] is None else seen[module][0] for module in modules]
    if all(attention is None for attention in attentions):
        raise UserError(f"{source} returns no attention weights in the chosen layers: there is nothing to show.")
    named = {f"The attention of layer {layer}": a for layer, a in zip(layers, attentions, strict=True)}
    check_finite(((name, a) for name, a in named.items() if a is not None), source)
    shapes = layer_shapes(model.config, layers)
    return Recorded(attentions, [mixing(*pair) for pair in zip(modules, shapes, strict=True)])


def change(before: Recorded, after: Recorded) -> list[list[float] | None]:
    """Return for each layer and head how far the weights of the two checkpoints are apart.

    It is the total variation distance, the mean over the queries: 0 for equal patterns, 1 for patterns that share no
    key.
    """
    return [
        None if a is None else numbers((a - b).abs().sum(-1).mean(-1) / 2)
        for a, b in zip(before.attentions, after.attentions, strict=True)
    ]


def packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def page(tokens: list[str], kinds: dict[int, str], shapes: list[LayerShape], models: dict[str, Recorded]) -> str:
    """Build the page, for the chosen layers and their kinds, and one checkpoint or two by name."""
    codes, checkpoints = bytearray(), []
    for name, recorded in models.items():
        layers = []
        for attention, matrices, shape in zip(recorded.attentions, recorded.mixing, shapes, strict=True):
            layer = {"mixing": {name: numbers(value) for name, value in matrices.items()}}
            layer["moved"] = {  # Frobenius norms, over those of the starts
                f"{matrix} from {start}": numbers((matrices[matrix] - value).norm() / value.norm())
                for matrix in matrices
                for start, value in starts(shape)[matrix].items()
            }
            if attention is not None:
                quantised, largest = quantise(attention)
                signed = quantised.dtype == torch.int8
                layer["codes"] = {"start": len(codes), "largest": largest, "signed": signed}
                codes += quantised.numpy().tobytes()
            layers.append(layer)
        checkpoints.append({"name": name, "layers": layers})
    data = {
        "tokens": tokens,
        "layers": [
            {"index": index, "kind": kind, **shape._asdict(), "pseudo_heads": shape.pseudo_heads or 1}
            for (index, kind), shape in zip(kinds.items(), shapes, strict=True)
        ],
        "checkpoints": checkpoints,
    }
    if len(models) == 2:
        data["change"] = change(*models.values())
    text = TEMPLATE.read_text(encoding="utf-8")
    from plotly.offline import get_plotlyjs  # the page needs it, `main` says where it is missing

    parts = {"PLOTLY": get_plotlyjs().encode(), "DATA": json.dumps(data).encode(), "CODES": bytes(codes)}
    for name, content in parts.items():
        text = text.replace(f"{{{{{name}}}}}", packed(content))
    return text


def encode(source: str, config: PreTrainedConfig, prompt: str) -> tuple[list[int], list[str]]:
    """Return ids and labels of the prompt's tokens. Raise `UserError`."""
    tokenizer = load_tokenizer(source, config.vocab_size)
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise UserError("The prompt has no tokens: expected at least one.")
    return ids, token_labels(tokenizer, ids)


def chosen_layers(layers: list[int] | None, count: int) -> list[int]:
    """Return the layers to show, in order. Raise `UserError`."""
    layers = sorted(set(range(count) if layers is None else layers))
    if not 0 <= layers[0] <= layers[-1] < count:
        raise UserError(f"--layers {' '.join(map(str, layers))}: expected numbers from 0 to {count - 1}.")
    return layers


def check_comparable(source: str, config: PreTrainedConfig, layers: list[int], prompt: str, ids: list[int]) -> None:
    """Refuse a checkpoint `source` of another shape than `config`, or that splits the prompt otherwise."""
    other, shapes = load_config(source), layer_shapes(config, layers)
    if other.num_hidden_layers != config.num_hidden_layers or layer_shapes(other, layers) != shapes:
        raise UserError(f"{source} has other layers, heads or pseudo-heads than MODEL: expected the same shape.")
    if encode(source, other, prompt)[0] != ids:
        raise UserError(f"{source} splits the prompt into other tokens than MODEL: expected the same tokenizer.")


def main(argv: Sequence[str] | None = None) -> None:
    """Look at the checkpoints and write the page. Raise `UserError`."""
    args = parse_arguments(argv)
    check_output_file(args.output, replace=True)
    config = load_config(args.model)
    layers = chosen_layers(args.layers, config.num_hidden_layers)
    shapes = layer_shapes(config, layers)
    ids, tokens = encode(args.model, config, args.prompt)
    sources = [args.model] if args.compare is None else [args.model, args.compare]
    if args.compare is not None:
        check_comparable(args.compare, config, layers, args.prompt, ids)
    limit = token_limit(shapes * len(sources))
    if len(ids) > limit:
        raise UserError(
            f"The prompt has {len(ids)} tokens, and a page under 10 MB has room for {limit} with {len(layers)} layers "
            f"of {len(sources)} checkpoint{'s' * (len(sources) > 1)}: shorten it, or choose fewer --layers."
        )
    names = [source_name(source) for source in sources]
    if len(names) == 2:
        names = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)]
    models = {name: record(source, ids, layers) for name, source in zip(names, sources, strict=True)}
    kinds = {layer: described(config).attention_kinds[layer] for layer in layers}
    text = page(tokens, kinds, shapes, models)
    with whole_file(args.output) as path:
        path.write_text(text, encoding="utf-8")
    print(f"Wrote {args.output}, {len(text.encode()) / 1e6:.1f} MB: {len(ids)} tokens, {len(layers)} layers.")


if __name__ == "__main__":
    run_cli(main)
