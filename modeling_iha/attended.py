# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Notice attention modules with virtual heads that attend without them.

A tool may replace a module, its forward or its attention core. The model would then compute something else without an
error. Therefore `noted_attention` records which modules attend, and hooks of the modules and of their decoder check
these records (see `attach_virtual_heads`)."""

from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from threading import local
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from .virtual_heads import virtual_heads_class


class Attended(local):
    """Record, per thread, which modules called `virtual_attention`.

    There are three records, because none works everywhere:

    - `unchecked` and `by_decoder` here do not work in compiled code, which loses what it writes to them.
    - `attended` of a module does not work where threads share the model, because they overwrite it.
    - `traced` of a module (see `Traced`) is for compiled layers in a decoder that is not compiled. It stays set, so
      it tells nothing of a single call."""

    unchecked: nn.Module | None = None  # the module that attended last, until it is checked

    def __init__(self):
        # For each decoder, the modules checked in its current forward
        self.by_decoder = WeakKeyDictionary[nn.Module, WeakSet[nn.Module]]()


class Traced:
    """Record that a module attends in compiled code. Every module and every copy of it has one of its own."""

    numbers = count()

    def __init__(self):
        self.number = next(self.numbers)
        self.noted = False
        # If true, compiled code sets `noted` at each call, which layers that share the code need. Otherwise `noted` is
        # set once, while Dynamo traces.
        self.is_set_at_each_call = False

    def __reduce__(self):
        return Traced, ()

    def note(self) -> None:
        """Note, in code that Dynamo traces, that the module attends."""
        if self.is_set_at_each_call:
            self.noted = True
        else:
            self._note_once(self.number)  # compiled code that reads the number is of one module

    @torch.compiler.assume_constant_result
    def _note_once(self, number: int) -> bool:
        """Note it while Dynamo traces, and not in compiled code.

        This is a method because PyTorch 2.11 takes no module as an argument of such a function."""
        self.noted = True
        return True


ATTENDED = Attended()
RECORDS = ("attended", "traced")  # attributes that an attention module with virtual heads has
REPLACED = (
    "{} has interleaved heads and attended without them: the module, its forward or its attention core was replaced. "
    "Use the model without the tool that did so, or apply remove_interleaving first. To choose a core, call "
    "set_attn_implementation of the interleaved model itself, after that of a model that holds it."
)


def add_records(module: Any) -> None:
    """Give an attention module its records, the attributes RECORDS."""
    module.attended = False
    module.traced = Traced()


def begin_forward(decoder: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Begin to record which of the interleaved attention modules of a decoder are checked in its forward."""
    is_compiled = torch.compiler.is_dynamo_compiling()
    if not is_compiled:
        ATTENDED.by_decoder[decoder] = WeakSet()
    # In a checkpointed layer Dynamo refuses code that leaves anything changed. A compiled decoder needs no record.
    is_set_once = is_compiled or (decoder.training and decoder.is_gradient_checkpointing)
    for module in modules:
        module.traced.is_set_at_each_call = not is_set_once


def note_attended(module: Any) -> None:
    """Record that a module calls `virtual_attention`."""
    module.attended = True
    if not torch.compiler.is_dynamo_compiling():
        ATTENDED.unchecked = module


def check_attended(module: nn.Module) -> None:
    """Raise a RuntimeError where a module with virtual heads attended without them."""
    # Either record will do: see `Attended`.
    attended = module.attended
    module.attended = False
    if torch.compiler.is_dynamo_compiling():
        module.traced.note()
    else:
        attended = attended or ATTENDED.unchecked is module
        ATTENDED.unchecked = None
        for modules in ATTENDED.by_decoder.values():
            modules.add(module)
    if not attended:
        raise RuntimeError(REPLACED.format(type(module).__name__))


def check_all_attended(decoder: PreTrainedModel, interleaved: dict[str, nn.Module]) -> None:
    """Raise a RuntimeError where attention modules of a decoder, by their names, were replaced or bypassed."""
    attended = None  # not known while Dynamo traces
    if not torch.compiler.is_dynamo_compiling():
        attended = ATTENDED.by_decoder.pop(decoder, None)
    for name, recorded in interleaved.items():
        module = _present_module(decoder, name, recorded)
        was_replaced = virtual_heads_class(module) is None
        if was_replaced or not (_has_attended(module, attended) or _may_skip(decoder, module)):
            raise RuntimeError(REPLACED.format(f"{name} of {type(decoder).__name__}"))


def _present_module(decoder: PreTrainedModel, name: str, recorded: nn.Module) -> nn.Module:
    """Return the attention module of this name.

    If a wrapper has changed the names, this is `recorded`, the module that had the name when the hooks were
    installed."""
    module = recorded
    with suppress(AttributeError):  # A wrapper of the layer changes the name.
        module = decoder.get_submodule(name)
    if virtual_heads_class(module) is not None:
        return module
    # A wrapper of the module, such as that of PEFT's adaption prompts, holds it.
    return next((inner for inner in module.modules() if virtual_heads_class(inner) is not None), module)


def _has_attended(module: nn.Module, attended: WeakSet[nn.Module] | None) -> bool:
    """Return whether a module attended in this forward, as far as is known.

    A compiled module tells only whether it attended at any time."""
    return attended is None or module.traced.noted or module in attended


def _may_skip(decoder: PreTrainedModel, module: nn.Module) -> bool:
    """Return whether a decoder may leave out a layer.

    Training may leave out layers at random, and generation the last ones (`assistant_early_exit`)."""
    if decoder.training and getattr(decoder, "layerdrop", 0):
        return True
    depth = getattr(decoder.config.get_text_config(decoder=True), "num_hidden_layers", None)
    layer_idx = getattr(module, "layer_idx", None) or 0
    return bool(depth) and layer_idx >= depth
