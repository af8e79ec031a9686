"""Write the model card of a checkpoint: card_template.md, filled from its configuration and how it was made."""

import json
import math
import shlex
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoModel

from iha.cards import (
    FROM_SCRATCH,
    LIMITS_OF_BASE,
    NOT_EVALUATED,
    license_text,
    markdown,
    markdown_table,
    one_printable_line,
    title_of,
)
from iha.checkpoints import positions_of
from iha.errors import UserError
from iha.kinds import additions_of, companion_of, described, is_ours, own_modules
from iha.model_cost import cost_of_model
from iha.plain_models import compared_with
from modeling_iha import IHAConfig


TEMPLATE = Path(__file__).with_name("card_template.md")
OVER_TUPLES = ("hyper", "simplicial")
COSTS = (
    "Parameters",
    "FLOPs of a forward",
    "FLOPs of a training step",
    "FLOPs of one more token",
    "Values in the KV cache",
)


def render_card(config: Any, name: str, *, from_scratch: bool = False, details: str = "", **made_from: Any) -> str:
    """Return a checkpoint's README.md: metadata for the Hub, how to use the model, and its attention layers.

    The usage example loads `name`, a directory or a Hub id. A model `from_scratch` gets a tag that says so. `details`
    are Markdown sections on how the checkpoint was made and what holds for it. `made_from` has more metadata, in the
    Hub's terms: `base_model`, `datasets` and the `LICENSE_KEYS`.
    """
    name = one_printable_line(name)
    shown = described(config)
    kinds = {kind: companion_of(kind) for kind in dict.fromkeys(shown.attention_kinds)}
    additions = additions_of(shown)
    tags = ["custom_code", "iha"]
    if "iha" in kinds:
        tags.append("interleaved-head-attention")
    if from_scratch:
        tags.append(FROM_SCRATCH)
    mechanisms = [f'- "{kind}": {known.card.format(config=shown)}' for kind, known in kinds.items()]
    mechanisms += [f"- in every layer {addition.card.format(config=shown)}" for addition in additions]
    of_all_tokens = {kind for kind, each in zip(shown.attention_kinds, shown.layer_types) if each == "full_attention"}
    virtual = {kind: known for kind, known in kinds.items() if kind in of_all_tokens and known.times_pairs}
    papers = [known.paper for known in (*kinds.values(), *additions) if known.paper]
    positions = positions_of(shown)
    return str(
        ModelCard.from_template(
            ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags, **made_from),
            template_path=str(TEMPLATE),
            title=markdown(title_of(name)),
            python_name=json.dumps(name, ensure_ascii=False),
            shell_name=shlex.quote(name),
            from_scratch=from_scratch,
            options=_options(config),
            mechanisms="\n".join(mechanisms),
            schedule=drawn_layers(shown),
            details=details.strip(),
            evaluation=NOT_EVALUATED,
            limits_of_base=LIMITS_OF_BASE,
            costs=_costs(config),
            context=positions and f"{positions:,}",
            is_iha=isinstance(shown, IHAConfig),
            in_vllm=all(known.served_by_vllm for known in (*kinds.values(), *additions)),
            kinds=list(kinds),
            times_pairs={kind: known.times_pairs(shown) for kind, known in virtual.items()},
            license_text=license_text(made_from.get("license_name") or made_from.get("license")),
            papers="\n".join(dict.fromkeys(f"- {paper}" for paper in papers)),
        )
    )


def _options(config: Any) -> dict[str, str]:
    """Return the options of commands that train a checkpoint: of the recipe for LoRA, and of `trl sft`."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    length = min(16384, positions_of(config) or 16384)  # the recipe states one, and a model may be shorter
    modules = own_modules(model)
    adapters = ["--lora_target_modules", "all-linear", *(["--lora_modules_to_save", *modules] if modules else [])]
    return {"recipe": f"--max_length {length}", "trl": " ".join(adapters)}


def drawn_layers(config: Any) -> str:
    """Draw the layers in text: a row for each kind of layer, a column for each layer."""
    layers = list(zip(config.attention_kinds, config.layer_types))
    reach = {"full_attention": "all tokens", "sliding_attention": f"window of {config.sliding_window} tokens"}
    rows = {layer: f"{layer[0]}, {reach.get(layer[1], layer[1])}" for layer in dict.fromkeys(layers)}
    width = max(map(len, rows.values()))
    lines = [f"{'layer':<{width}}  {''.join(f'{number:<5}' for number in range(0, len(layers), 5))}".rstrip()]
    for row, label in rows.items():
        lines.append(f"{label:<{width}}  {''.join('█' if layer == row else '·' for layer in layers)}")
    return "\n".join(lines)


def _costs(config: Any) -> str | None:
    """Return the table of predicted costs next to the plain model: "mha" over all tokens in every layer, or the base.

    It is `None` for another model, and for one that cannot be counted: layers over pairs of tokens take minutes.
    """
    tokens = positions_of(config)
    over_tuples = any(kind in OVER_TUPLES for kind in described(config).attention_kinds)
    if not is_ours(config) or tokens is None or over_tuples:
        return None
    name, plain = list(compared_with(config).items())[-1]
    try:
        ours, other = (astuple(cost_of_model(each, tokens)) for each in (config, plain))
    except UserError:
        return None
    rows = []
    for title, of_ours, of_other in zip(COSTS, ours, other):
        is_flops = "FLOPs" in title  # two for each multiply-add
        figures = [_short(2 * value) if is_flops else f"{value:,}" for value in (of_ours, of_other)]
        rows.append([title, *figures, f"{of_ours / of_other:.3f}"])
    return markdown_table(["", "this model", name.removeprefix("global "), "ratio"], rows).rstrip()


def _short(number: float) -> str:
    """Return a large number in four digits, such as "45.38 T"."""
    units = ("", "k", "M", "G", "T", "P", "E")
    thousands = min(max(0, int(math.log10(number)) // 3), len(units) - 1)
    return f"{number / 1000**thousands:.4g} {units[thousands]}".rstrip()
