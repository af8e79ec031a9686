"""Find what a GGUF file says about its model and Transformers leaves out, so that it would compute something else."""

from transformers import PreTrainedConfig
from transformers.integrations.gguf.reader import read_gguf_metadata


def unread_entries(file: str, config: PreTrainedConfig) -> list[str]:
    """Return what a GGUF file says about RoPE, windows and biases that Transformers left out of its `config`."""
    metadata, names = read_gguf_metadata(file)  # `gguf.GGUFReader` takes seconds for a vocabulary
    header = {key.partition(".")[2]: value for key, value in metadata.items()}
    unread = []
    off = (None, 0, 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "default":
        unread += [key for key in ("rope.scaling.factor", "rope.scale_linear") if header.get(key) not in off]
        # The factors of llama3 and longrope stand in tensors.
        unread += [name for name in names if name.startswith("rope_")]
        if "rope.dimension_count" in header:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            stated = header["rope.dimension_count"]
            if stated != head_dim * rope.get("partial_rotary_factor", 1):
                unread.append(f"rope.dimension_count={stated}")
    if getattr(config, "sliding_window", None) is None and header.get("attention.sliding_window") not in off:
        unread.append("attention.sliding_window")
    biases = [name for name in names if name.endswith(".bias")]
    for field, part in (("attention_bias", ".attn_"), ("mlp_bias", ".ffn_")):
        if getattr(config, field, None) is False:
            unread += [name for name in biases if part in name][:1]
    return unread
