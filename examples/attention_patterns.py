"""Draw the P² attention patterns of one head, and how heads are mixed for it, as one picture.

The model is a checkpoint of this package: IHAForCausalLM, or a decoder whose heads were interleaved or paired. For a
directory without a tokenizer the prompt is read as bytes.

example: python examples/attention_patterns.py small-iha "def main(argv):" patterns.png --layer 0 --head 1
"""

from argparse import ArgumentParser
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


parser = ArgumentParser(description=__doc__)
parser.add_argument("model", help="a directory or a Hub id; its code runs")
parser.add_argument("prompt")
parser.add_argument("out", help="the picture to write")
parser.add_argument("--layer", type=int, help="index of a layer with virtual tokens (the first)")
parser.add_argument("--head", type=int, default=0, help="index of the head, or of the group of paired heads (0)")
args = parser.parse_args()

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
    count = attentions[layers[0]].shape[1]
    parser.error(f"expected a layer among {layers} and a head from 0 to {count - 1}")
num_pseudo_heads = model.config.num_pseudo_heads
# Virtual token n P + p is pseudo-head p of token n.
weights = attentions[layer][0, args.head].unflatten(1, (-1, num_pseudo_heads)).unflatten(0, (-1, num_pseudo_heads))

figure = plt.figure(figsize=(10, 6), layout="constrained")
figure.suptitle(f"Layer {layer}, head {args.head}: attention of {num_pseudo_heads}² pairs of pseudo-heads")
left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
for p, row in enumerate(left.subplots(num_pseudo_heads, num_pseudo_heads, squeeze=False)):
    for q, axes in enumerate(row):
        axes.imshow(weights[:, p, :, q], vmin=0, vmax=weights.max(), cmap="viridis")
        axes.set(title=f"query {p}, key {q}", xlabel="token", ylabel="token")
for module in (each for each in model.modules() if hasattr(each, "q_mix") and each.layer_idx == layer):
    # Paired heads have no mixing.
    group = args.head // (module.q_mix.weight.shape[0] // module.k_mix.weight.shape[0])
    shares = {
        "mixing of queries": module.q_mix.value()[:, args.head],
        "of keys": module.k_mix.value()[:, group],
        "of values": module.v_mix.value()[:, group],
        "collapse": module.collapse.value()[args.head].unflatten(0, (-1, num_pseudo_heads)),
    }
    for axes, (name, values) in zip(right.subplots(2, 2).flat, shares.items()):
        image = axes.imshow(values.detach(), vmin=-1, vmax=1, cmap="RdBu")
        axes.set(title=name, xlabel="pseudo-head", ylabel="head", xticks=range(num_pseudo_heads))
    right.colorbar(image, ax=right.axes, shrink=0.6)
figure.savefig(args.out)
