"""Draw the P² attention patterns of one head, and how heads are mixed for it, as one picture.

The model is a checkpoint of this package: IHAForCausalLM, or a decoder whose heads were interleaved or paired. For a
directory without a tokenizer the prompt is read as bytes.

example: python examples/attention_patterns.py small-iha "def main(argv):" patterns.png --layer 0 --head 1
"""

from argparse import ArgumentParser
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.backend_bases import FigureCanvasBase
from transformers import AutoModelForCausalLM, AutoTokenizer

from iha.errors import run_cli
from iha.sources import find_source


parser = ArgumentParser(description=__doc__)
parser.add_argument("model", help="a directory or a Hub id; its code runs")
parser.add_argument("prompt")
parser.add_argument("out", help="the picture to write")
parser.add_argument("--layer", type=int, help="index of a layer with virtual tokens (the first)")
parser.add_argument("--head", type=int, default=0, help="index of the head, or of the group of paired heads (0)")
args = parser.parse_args()
run_cli(lambda: find_source(args.model))  # a wrong name is an error of one line, before anything is loaded
endings = FigureCanvasBase.get_supported_filetypes()
if Path(args.out).suffix.removeprefix(".") not in endings:
    parser.error(f"{args.out}: expected a file name that ends in one of .{', .'.join(endings)}")

# Only the eager core returns attention weights.
model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True, attn_implementation="eager").eval()
input_ids = torch.tensor([list(args.prompt.encode())])
if not Path(args.model).is_dir() or any(Path(args.model).glob("tokenizer*")):
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    input_ids = tokenizer(args.prompt, return_tensors="pt").input_ids
with torch.no_grad():
    attentions = model(input_ids, use_cache=False, output_attentions=True).attentions

layers = [index for index, weights in enumerate(attentions) if weights.shape[-1] > input_ids.shape[1]]
if not layers:
    parser.error(f"{args.model} has no layer with virtual tokens")
layer = layers[0] if args.layer is None else args.layer
if layer not in layers or not 0 <= args.head < attentions[layer].shape[1]:
    parser.error(f"expected a layer among {layers} and a head below {attentions[layers[0]].shape[1]}")
num_pseudo_heads = model.config.num_pseudo_heads
# Virtual token n P + p is pseudo-head p of token n.
weights = attentions[layer][0, args.head].unflatten(1, (-1, num_pseudo_heads)).unflatten(0, (-1, num_pseudo_heads))
# Most heads attend to the first token more than to all others together: the scale is that of the others.
others = weights[1:, :, 1:]
highest = float(others.max()) if others.numel() else 1.0

mixed = [each for each in model.modules() if hasattr(each, "q_mix") and each.layer_idx == layer]  # not paired heads
figure = plt.figure(figsize=(6 + 4 * len(mixed), 6), layout="constrained")
place = f"Layer {layer}, {'head' if mixed else 'group'} {args.head}"
figure.suptitle(f"{place}, P = {num_pseudo_heads}", fontweight="bold")
left, *right = figure.subfigures(1, 1 + len(mixed), width_ratios=[3, 2][: 1 + len(mixed)], squeeze=False)[0]
left.suptitle("Attention of query pseudo-heads to key pseudo-heads")
for pair, axes in enumerate(left.subplots(*[num_pseudo_heads] * 2, squeeze=False, sharex=True, sharey=True).flat):
    p, q = divmod(pair, num_pseudo_heads)
    image = axes.imshow(weights[:, p, :, q], vmin=0, vmax=highest, cmap="viridis", aspect="auto")
    axes.set(title=f"query {p}, key {q}", xlabel="token of the key", ylabel="token of the query")
    axes.locator_params(integer=True)
    axes.label_outer()
scale = {"label": "attention weight (arrow: the first token may have more)", "extend": "max"}
left.colorbar(image, ax=left.axes, location="bottom", shrink=0.6, **scale)
for module, side in zip(mixed, right):
    side.suptitle("Shares of heads in its pseudo-heads")
    group = args.head // (module.q_mix.weight.shape[0] // module.k_mix.weight.shape[0])
    shares = {
        "queries": module.q_mix.value()[:, args.head],
        "keys": module.k_mix.value()[:, group],
        "values": module.v_mix.value()[:, group],
        "collapse": module.collapse.value()[args.head].unflatten(0, (-1, num_pseudo_heads)),
    }
    for axes, (name, values) in zip(side.subplots(2, 2).flat, shares.items()):
        image = axes.imshow(values.detach(), vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
        axes.set(title=name, xlabel="pseudo-head", ylabel="head", xticks=range(num_pseudo_heads))
        axes.locator_params("y", integer=True)
    if len(values) == 1:  # the head's own collapse
        axes.set(yticks=[0], yticklabels=[args.head])
    side.colorbar(image, ax=side.axes, location="bottom", shrink=0.8, label="share of a head")
figure.savefig(args.out)
