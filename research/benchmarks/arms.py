"""Name the forms that benchmarks compare, as five layers each."""

from modeling_iha.flop_matched_window import flop_matched_window


def arms(tokens: int) -> dict[str, dict]:
    """Return the fields of five layers: ordinary attention, the same with windows, paired heads, the paper's schedule.

    The windows are those of the presets of the 2.4B models, for the number of tokens."""
    windows = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
    fields = {
        "mha": {"attention_kinds": "mha", "num_hidden_layers": 5},
        "windows": {**windows, "attention_kinds": "mha", "sliding_window": tokens // 16},
        "paired": {
            **windows,
            "attention_kinds": ["paired_heads"] * 4 + ["mha"],
            "num_pseudo_heads": 4,
            "sliding_window": tokens // 64,
        },
    }
    for virtual in (2, 4):
        fields[f"iha, P = {virtual}"] = {
            **windows,
            "attention_kinds": ["iha"] * 4 + ["mha"],
            "num_pseudo_heads": virtual,
            "sliding_window": flop_matched_window(tokens, virtual),
        }
    return fields
