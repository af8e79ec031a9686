"""Check which attention a conversion from Llama can have, without importing PyTorch, which takes seconds."""

from pathlib import Path

from iha.errors import UserError


# The attention kinds with an exact start from Llama: those whose file defines one. To import it imports PyTorch.
KINDS = sorted(
    file.stem
    for file in Path(__file__).parents[1].joinpath("kinds").glob("*.py")
    if "\ndef start(" in file.read_text(encoding="utf-8")
)


def check_layers(
    num_pseudo_heads: int | None, schedule: str, window: int | None, kind: str, output_gate: str | None = None
) -> None:
    """Reject a kind, P, schedule, window and gate that cannot work together for any source. Raise `UserError`."""
    if kind == "mha" and output_gate is None:
        raise UserError("kind 'mha' without a gate is what the source has: give --output-gate, or another --kind.")
    if kind != "mha" and kind not in KINDS:
        raise UserError(f"kind={kind!r} has no exact start from Llama; expected one of {', '.join(KINDS)}.")
    if kind == "iha" and num_pseudo_heads is None:
        raise UserError("kind 'iha' needs a number of pseudo-heads, such as --num-pseudo-heads 2.")
    if kind != "iha" and num_pseudo_heads is not None:
        raise UserError(f"kind {kind!r} has no pseudo-heads: leave out --num-pseudo-heads.")
    if kind != "iha" and schedule != "global":
        raise UserError(
            f"kind {kind!r} with schedule={schedule!r}: only 'iha' has that schedule; leave out --schedule."
        )
    if window is not None and schedule == "global":
        raise UserError(f"window={window}: the global schedule has no window; add --schedule hybrid or drop --window.")
