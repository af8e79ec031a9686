"""Name the arms that `research.compare` trains, and build the configuration of each at a size.

Every arm of a size has as many parameters as ordinary attention: one with more of them has a narrower FFN. In arms
with windows the fifth layer of five has ordinary attention without a window.
"""

from dataclasses import asdict, dataclass, replace

from iha.errors import UserError
from iha.model_cost import parameters_of
from modeling_iha import IHAConfig


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Arm:
    """Hold how the layers of a model attend.

    Args:
        kind: kind of attention of the layers with a window, or of all layers if there is none.
        pseudo_heads: P of this kind.
        windows: the window is the length of a row divided by this number.
        positions: positions in the windows are multiplied by it.
        additions: further fields of the configuration, which act in all layers.
    """

    kind: str = "mha"
    pseudo_heads: int = 1
    windows: int | None = None
    positions: int = 1
    additions: tuple[tuple[str, object], ...] = ()


ADDITIONS: dict[str, tuple[tuple[str, object], ...]] = {
    "xsa": (("exclusive_attention", True),),
    "gate": (("output_gate", "elementwise"),),
}
ADDITIONS["xsa+gate"] = ADDITIONS["xsa"] + ADDITIONS["gate"]
BARE_ARMS = {
    "windows": Arm(windows=16),
    "short_windows": Arm(windows=64, positions=4),
    "mha": Arm(),
    "paired": Arm("paired_heads", 4, windows=64),
    "iha": Arm("iha", 4, windows=32),
}
STACKED_ARMS = {
    f"{name}+{added}": replace(arm, additions=fields)
    for name, arm in BARE_ARMS.items()
    for added, fields in ADDITIONS.items()
}
# A comparison is with the first of its arms in this order.
ARMS = BARE_ARMS | STACKED_ARMS


@dataclass(frozen=True)
class Size:
    """Hold the shape of the models of a size, and how they are trained.

    Args:
        first_rate: the learning rate at which the tuning begins.
        tokens: length of a row. `with_rows` changes it.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    tokens_per_step: int
    steps: int
    first_rate: float = 4e-3
    held_out_rows: int = 64
    tokens: int = 256

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.tokens_per_step // self.tokens

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the configuration that tell the shape."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        return {name: value for name, value in asdict(self).items() if name in names}

    def with_rows(self, tokens: int) -> "Size":
        """Return this size with rows of so many tokens. Raise `UserError`."""
        if not 32 <= tokens <= self.tokens_per_step:
            raise UserError(f"--tokens {tokens}: expected at least 32, at most {self.tokens_per_step}.")
        return replace(self, tokens=tokens)


SIZES = {
    # This one shows what the command prints, and compares nothing.
    "seconds": Size(32, 88, 5, 4, tokens_per_step=512, steps=60, first_rate=8e-3, held_out_rows=16),
    "tiny": Size(64, 176, 5, 4, tokens_per_step=2048, steps=400),
    "small": Size(128, 352, 5, 8, tokens_per_step=2048, steps=600),
    "medium": Size(256, 704, 5, 8, tokens_per_step=2048, steps=800, first_rate=1e-3),
    "large": Size(512, 1408, 5, 8, tokens_per_step=32768, steps=400, first_rate=1e-3),  # for a GPU
}


def build(size: Size, arm: Arm, intermediate_size: int | None = None) -> IHAConfig:
    """Return the configuration of an arm, with an FFN of the given width or of that of the size."""
    fields = {
        **size.fields,
        "num_key_value_heads": size.num_attention_heads,
        "max_position_embeddings": size.tokens,
        "vocab_size": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "attention_kinds": arm.kind,
        "num_pseudo_heads": arm.pseudo_heads,
        **dict(arm.additions),
    }
    if intermediate_size is not None:
        fields["intermediate_size"] = intermediate_size
    if arm.windows:
        fields["sliding_window"] = size.tokens // arm.windows
        fields["attention_kinds"] = [arm.kind] * 4 + ["mha"]
        fields["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"]
    if arm.positions > 1:
        wide = {**PLAIN_ROPE, "rope_type": "linear", "factor": 1 / arm.positions}
        fields["rope_parameters"] = {"full_attention": PLAIN_ROPE, "sliding_attention": wide}
    return IHAConfig(**fields)


def config_of(size: Size, arm: Arm) -> IHAConfig:
    """Return the configuration of an arm, whose FFN is as wide as the parameters of ordinary attention allow."""
    more = parameters_of(build(size, arm)) - parameters_of(build(size, Arm()))
    per_channel = 3 * size.hidden_size * size.num_hidden_layers
    return build(size, arm, size.intermediate_size - round(more / per_channel))
