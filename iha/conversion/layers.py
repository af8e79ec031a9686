"""Say which attention a conversion from Llama can have, without importing PyTorch, which takes seconds."""

from dataclasses import dataclass

from iha.errors import UserError


# The attention kinds with an exact start from Llama: those with a `start` in iha/kinds, which imports PyTorch.
KINDS = ("dcmha", "diff_v2", "iha", "knocking_heads", "talking_heads")


@dataclass(frozen=True)
class Layers:
    """Hold which attention the layers of a converted model get, by arguments of `iha.api.convert`.

    Raise `UserError` for arguments that cannot work together for any source.
    """

    num_pseudo_heads: int | None = None
    schedule: str = "global"
    window: int | None = None
    kind: str = "iha"
    options: dict | None = None
    output_gate: str | None = None

    def __post_init__(self):
        kind = self.kind
        if kind == "mha" and self.output_gate is None:
            raise UserError("kind 'mha' without a gate is what the source has: give --output-gate, or another --kind.")
        if kind != "mha" and kind not in KINDS:
            raise UserError(f"kind={kind!r} has no exact start from Llama; expected one of {', '.join(KINDS)}.")
        if kind == "iha" and self.num_pseudo_heads is None:
            raise UserError("kind 'iha' needs a number of pseudo-heads, such as --num-pseudo-heads 2.")
        if kind != "iha" and self.num_pseudo_heads is not None:
            raise UserError(f"kind {kind!r} has no pseudo-heads: leave out --num-pseudo-heads.")
        if kind != "iha" and self.schedule != "global":
            has = f"kind {kind!r} with schedule={self.schedule!r}"
            raise UserError(f"{has}: only 'iha' has that schedule; leave out --schedule.")
        if self.window is not None and self.schedule == "global":
            has = f"window={self.window}: the global schedule has no window"
            raise UserError(f"{has}; add --schedule hybrid or drop --window.")
