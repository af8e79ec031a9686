"""Name the attention kinds and options that every kind's tests run on: those of `ATTENTION_CLASSES`."""

from dataclasses import dataclass, field

import pytest
from helpers import small_config

from modeling_iha.configuration_iha import OPTIONS_CLASSES


@dataclass(frozen=True)
class Mechanism:
    """Name an attention kind and its options."""

    kind: str
    options: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        return f"{self.kind}-{'linear' if self.is_linear else 'example' if self.options else 'default'}"

    @property
    def is_linear(self):
        """Return whether this is the linear form of "hyper", which is a separate layer."""
        return self.kind == "hyper" and bool(self.options.get("linear"))

    def config(self, window=None, **overrides):
        """Return a `small_config` of layers of this kind, or skip the test for a window that the kind rejects.

        The epsilon of the norms is of the size of the squares that it is added to: where attention is normed, as in
        "diff", a query that sees a single key would else leave its scale no gradient.
        """
        window_fields = {} if window is None else {"layer_types": "sliding_attention", "sliding_window": window}
        options = {self.kind: self.options} if self.options else {}
        all_fields = {
            "attention_kinds": self.kind,
            "attention_options": options,
            "rms_norm_eps": 0.1,
            **window_fields,
            **overrides,
        }
        try:
            return small_config(**all_fields)
        except Exception as error:
            if not self.is_linear or all_fields.get("sliding_window") is None or "window" not in str(error):
                raise
            pytest.skip(str(error).splitlines()[-1])

    def hybrid_config(self, **overrides):
        """Return a config with a window layer below a global one, if the kind takes windows."""
        if self.is_linear:
            return self.config(**overrides)
        return self.config(layer_types=["sliding_attention", "full_attention"], sliding_window=3, **overrides)


def all_mechanisms():
    """Yield every kind with its default options, with its example options where it has some, and a linear form."""
    for kind, options in OPTIONS_CLASSES.items():
        yield Mechanism(kind)
        if options is not None and options.example:
            yield Mechanism(kind, options.example)
    yield Mechanism("hyper", {"linear": True})
