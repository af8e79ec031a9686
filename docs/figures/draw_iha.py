"""Draw the README's figure of Interleaved Head Attention: mix, interleave, attend, collapse.

The figure shows one head of H = 3 with P = 2 pseudo-heads on N = 3 tokens. Its card is opaque, so that the same file
is legible on a light and on a dark page, and its text is drawn as curves, so that no font has to be installed.

example: python docs/figures/draw_iha.py            # writes docs/figures/iha.svg
"""

import argparse
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle


TOKENS, HEADS, PSEUDO_HEADS = 3, 3, 2
INK, MUTED, FAINT, CARD = "#1b2733", "#5d6b7a", "#d5dce4", "#fbfcfe"
HEAD_COLOURS = ["#2f7ed8", "#f28f3b", "#3aa675"]
OUTPUT = "#7a5bb5"
# The shares of the heads in each pseudo-head of the head that is shown; learned in a model.
QUERY_SHARES = [(0.55, 0.30, 0.15), (0.20, 0.25, 0.55)]
KEY_SHARES = [(0.25, 0.60, 0.15), (0.60, 0.10, 0.30)]
COLLAPSE_SHARES = (0.4, 0.6)

CELL = 0.56  # side of a square, and the distance of two virtual tokens
BOTTOM = 1.15  # of the last virtual token
HEADS_X, QUERIES_X, MASK_X, OUTPUTS_X, COLLAPSED_X = 1.9, 5.6, 7.05, 11.6, 13.8
STEPS_Y, FORMULAS_Y, LABELS_Y, NOTES_Y = 6.35, 5.87, 5.13, 0.48
WIDTH, HEIGHT = 15.6, 6.8


def virtual_y(token: int, pseudo_head: int) -> float:
    """Return the height of the centre of a virtual token, counted from 0; earlier ones are higher."""
    return BOTTOM + CELL * (TOKENS * PSEUDO_HEADS - 1 - token * PSEUDO_HEADS - pseudo_head)


def token_y(token: int) -> float:
    """Return the height of the centre of a token, in the middle of its virtual tokens."""
    return sum(virtual_y(token, p) for p in range(PSEUDO_HEADS)) / PSEUDO_HEADS


def square(axes: Axes, x: float, y: float, shares, colours, side: float = 0.40, turned: bool = False) -> None:
    """Draw a square around (x, y) with a band for each colour, as broad as its share; `turned` bands stand upright."""
    start = 0.0
    for share, colour in zip(shares, colours):
        corner = (x - side / 2 + start * side, y - side / 2) if turned else (x - side / 2, y + side / 2 - start * side)
        size = (share * side, side) if turned else (side, -share * side)
        axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="none", zorder=3))
        start += share
    axes.add_patch(
        Rectangle((x - side / 2, y - side / 2), side, side, facecolor="none", edgecolor=INK, linewidth=0.9, zorder=4)
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": MUTED, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 10}
    axes.annotate("", end, start, arrowprops=style)


def strand(axes: Axes, xs: tuple[float, float], ys: tuple[float, float], bend: float, share: float, **style) -> None:
    """Draw a line from (xs[0], ys[0]) to (xs[1], ys[1]), as thick as its share and level for `bend` at both ends."""
    (left, right), (start, end) = xs, ys
    axes.plot(
        [left, left + bend, right - bend, right],
        [start, start, end, end],
        linewidth=0.6 + 5.5 * share,
        solid_capstyle="butt",
        solid_joinstyle="round",
        zorder=2,
        **style,
    )


def draw_mixing(axes: Axes) -> None:
    """Draw how every pseudo-head of a token reads all heads of that token."""
    xs = [HEADS_X + CELL * h for h in range(HEADS)]
    for h, x in enumerate(xs):
        axes.text(x, token_y(0) + 0.42, f"{h + 1}", ha="center", va="center", color=HEAD_COLOURS[h], weight="bold")
    axes.text(xs[1], LABELS_Y, f"$H = {HEADS}$ heads", ha="center", va="center", color=MUTED)
    for n in range(TOKENS):
        axes.text(HEADS_X - 0.42, token_y(n), f"token {n + 1}", ha="right", va="center", color=INK)
        for h, x in enumerate(xs):
            square(axes, x, token_y(n), [1.0], [HEAD_COLOURS[h]])
        # A bundle of one strand for each head.
        for p, shares in enumerate(QUERY_SHARES):
            for h, share in enumerate(shares):
                offset = 0.1 * (1 - h)
                ends = (token_y(n) + offset, virtual_y(n, p) + offset)
                strand(axes, (xs[-1] + 0.28, QUERIES_X - 0.28), ends, 0.45, share, color=HEAD_COLOURS[h], alpha=0.75)


def draw_interleaving(axes: Axes) -> None:
    """Draw the virtual tokens (n, p) in their order, as queries down the side and as keys along the top."""
    axes.text(QUERIES_X, LABELS_Y, "queries of head $h$", ha="center", va="center", color=MUTED)
    for n in range(TOKENS):
        for p in range(PSEUDO_HEADS):
            name = f"({n + 1},{p + 1})"
            square(axes, QUERIES_X, virtual_y(n, p), QUERY_SHARES[p], HEAD_COLOURS)
            axes.text(QUERIES_X + 0.3, virtual_y(n, p), name, ha="left", va="center", color=INK, size=10.5)
            x = MASK_X + CELL * (n * PSEUDO_HEADS + p + 0.5)
            square(axes, x, LABELS_Y - 0.42, KEY_SHARES[p], HEAD_COLOURS, turned=True)
            axes.text(x, LABELS_Y - 0.78, name, ha="center", va="center", color=INK, size=8.5)
    middle = MASK_X + CELL * TOKENS * PSEUDO_HEADS / 2
    axes.text(middle, LABELS_Y, "keys and values of head $h$", ha="center", va="center", color=MUTED)


def draw_attention(axes: Axes) -> None:
    """Draw the causal mask over the N P virtual tokens: each sees itself and all before it."""
    size = TOKENS * PSEUDO_HEADS
    top = virtual_y(0, 0) + CELL / 2
    for row in range(size):
        for column in range(size):
            corner = (MASK_X + CELL * column, top - CELL * (row + 1))
            seen = column <= row
            axes.add_patch(
                Rectangle(corner, CELL, CELL, facecolor="#b9cdea" if seen else "white", edgecolor=FAINT, linewidth=0.8)
            )
    for n in range(TOKENS + 1):
        offset = CELL * PSEUDO_HEADS * n
        axes.plot([MASK_X + offset] * 2, [top, top - CELL * size], color=INK, linewidth=1.2, zorder=4)
        axes.plot([MASK_X, MASK_X + CELL * size], [top - offset] * 2, color=INK, linewidth=1.2, zorder=4)


def draw_collapse(axes: Axes) -> None:
    """Draw how the P outputs of a token become one, weighted by R."""
    axes.text(OUTPUTS_X, LABELS_Y, "pseudo-outputs", ha="center", va="center", color=MUTED)
    axes.text(COLLAPSED_X, LABELS_Y, "output of head $h$", ha="center", va="center", color=MUTED)
    mask_end = MASK_X + CELL * TOKENS * PSEUDO_HEADS
    for n in range(TOKENS):
        for p, share in enumerate(COLLAPSE_SHARES):
            y = virtual_y(n, p)
            arrow(axes, (mask_end + 0.14, y), (OUTPUTS_X - 0.28, y))
            square(axes, OUTPUTS_X, y, [1.0], [OUTPUT + "66"])
            axes.text(OUTPUTS_X + 0.3, y, f"({n + 1},{p + 1})", ha="left", va="center", color=INK, size=10.5)
            xs = (OUTPUTS_X + 0.92, COLLAPSED_X - 0.28)
            strand(axes, xs, (y, token_y(n)), 0.25, share, color=OUTPUT, alpha=0.6)
        square(axes, COLLAPSED_X, token_y(n), [1.0], [OUTPUT])
        axes.text(COLLAPSED_X + 0.32, token_y(n), f"token {n + 1}", ha="left", va="center", color=INK)


def draw_steps(axes: Axes) -> None:
    """Write the name and the formula of each step above it, and a note below."""
    middle = MASK_X + CELL * TOKENS * PSEUDO_HEADS / 2
    mix, collapse = r"\tilde{q}_{h,p} = \sum_m \alpha_{m,h,p}\; q_m", r"o_h = \sum_p R_{h,p}\; \tilde{o}_{h,p}"
    steps = [
        (2.7, "1  Mix", f"${mix}$", r"keys and values likewise, by an $\alpha$ of their own"),
        (QUERIES_X + 0.2, "2  Interleave", f"$P = {PSEUDO_HEADS}$ for each token", ""),
        (
            middle,
            "3  Attend",
            f"causal, $N P = {TOKENS * PSEUDO_HEADS}$ virtual tokens",
            r"two tokens meet $P \times P$ times in each head",
        ),
        (13.0, "4  Collapse", f"${collapse}$", "then concatenate heads, $W_O$"),
    ]
    for x, name, formula, note in steps:
        axes.text(x, STEPS_Y, name, ha="center", va="center", color=INK, size=15, weight="bold")
        axes.text(x, FORMULAS_Y, formula, ha="center", va="center", color=INK, size=11.5)
        axes.text(x, NOTES_Y, note, ha="center", va="center", color=MUTED, size=11)
    axes.plot([0.45, WIDTH - 0.45], [5.45, 5.45], color=FAINT, linewidth=1)


def draw() -> Figure:
    figure = Figure(figsize=(WIDTH * 0.75, HEIGHT * 0.75))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    axes.axis("off")
    card = FancyBboxPatch(
        (0.12, 0.12),
        WIDTH - 0.24,
        HEIGHT - 0.24,
        boxstyle="round,pad=0,rounding_size=0.25",
        facecolor=CARD,
        edgecolor=FAINT,
        linewidth=1,
        zorder=0,
    )
    axes.add_patch(card)
    draw_mixing(axes)
    draw_interleaving(axes)
    draw_attention(axes)
    draw_collapse(axes)
    draw_steps(axes)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the README's figure.", epilog="example: python docs/figures/draw_iha.py"
    )
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_name("iha.svg"), help="(iha.svg)")
    out = parser.parse_args().out
    # Nothing in the file depends on the time or the machine.
    with rc_context({"font.size": 12, "svg.fonttype": "path", "svg.hashsalt": "iha"}):
        metadata = {"Date": None, "Creator": None} if out.suffix == ".svg" else None
        draw().savefig(out, transparent=True, metadata=metadata, dpi=130)


if __name__ == "__main__":
    main()
