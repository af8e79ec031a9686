"""What this repository knows of each attention mechanism and a checkpoint does not need, one file for each:
`mechanisms/<kind>.py`.

A kind of `ATTENTION_CLASSES` is found by its name. It may go without a file, and then has the defaults of a
`Mechanism`.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch

from modeling_iha import IHAConfig
from modeling_iha.attention_kinds import ATTENTION_CLASSES

from .cost import Cost


@dataclass(frozen=True)
class Mechanism:
    """The `MECHANISM` of a companion file.

    Attributes:
        card: what a layer does, for the reader of a model card; `{config.field}` is a field of its config. By default
            the first sentence of the class's docstring.
        cost: the attention between the projections, of (config, tokens, window in tokens or `None`, form as in
            `score_products`).
        start: the exact start from a multi-head attention: parameters of the attention module by name, float32, of
            (config, generator, value offsets "balanced" or "none"). Without it nothing is converted to the kind.
        deviations: how far the parameters that a multi-head attention lacks are from one, by name, of (attention
            module, config). Without it no layer of the kind is one.
        control: the parameter whose sign the control of a verification reverses.
        forms: rows of the benchmark of mechanisms: fields of a config, by title. By default one, with default options.
    """

    card: str | None = None
    cost: Callable[[IHAConfig, int, int | None, str], Cost] | None = None
    start: Callable[[IHAConfig, torch.Generator, str], dict[str, torch.Tensor]] | None = None
    deviations: Callable[[torch.nn.Module, IHAConfig], dict[str, torch.Tensor]] | None = None
    control: str | None = None
    forms: dict[str, dict] = field(default_factory=dict)


def mechanism_of(kind: str) -> Mechanism:
    """The companion of a kind of `ATTENTION_CLASSES`, with its defaults filled in."""
    name = f"{__name__}.{kind}"
    mechanism = importlib.import_module(name).MECHANISM if find_spec(name) else Mechanism()
    card = mechanism.card or _first_sentence(ATTENTION_CLASSES[kind]).replace("{", "{{").replace("}", "}}")
    return replace(mechanism, card=card, forms=mechanism.forms or {kind: {}})


def all_mechanisms() -> dict[str, Mechanism]:
    """Every kind's, in the order of `ATTENTION_CLASSES`."""
    return {kind: mechanism_of(kind) for kind in ATTENTION_CLASSES}


def _first_sentence(documented: type) -> str:
    """The first sentence of a class's own docstring on one line, or the class's name."""
    text = (documented.__doc__ or f"{documented.__name__}.").strip()
    return " ".join(re.split(r"(?<=\.)\s+(?=[A-Z])|\n\s*\n", text, maxsplit=1)[0].split())
