"""Writes the model card of a checkpoint from `template.md`."""

from collections import Counter
from pathlib import Path

from gguf import GGUFReader
from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

from mechanisms import mechanism_of
from modeling_iha import IHAConfig


TEMPLATE = Path(__file__).with_name("template.md")

USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"""


def render_card(
    config: IHAConfig,
    name: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    details: str = "",
) -> str:
    """The text of a checkpoint's README.md: metadata for the Hub, how to use the model, and its attention layers.

    Args:
        name (`str`): title of the card, and what the usage example loads: a directory's name or a Hub id.
        base_model (`str`, *optional*): Hub id of the model this one was made from.
        license (`str`, *optional*): identifier of the Hub, such as "apache-2.0"; left out when unknown.
        datasets (`list[str]`, *optional*): Hub ids of the training data.
        details (`str`, *optional*): Markdown sections on how the checkpoint was made and what holds for it.
    """
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["custom_code", "iha"] + ["interleaved-head-attention"] * ("iha" in config.attention_kinds),
        base_model=base_model,
        license=license,
        datasets=datasets,
    )
    return str(
        ModelCard.from_template(
            metadata,
            template_path=str(TEMPLATE),
            name=name,
            mechanisms="\n".join(
                f'- "{kind}": {mechanism_of(kind).card.format(config=config)}'
                for kind in dict.fromkeys(config.attention_kinds)
            ),
            usage=USAGE.format(name=name),
            details=details.strip(),
            architecture=_architecture(config),
        )
    )


def source_license(source: str) -> str | None:
    """The license that a checkpoint names in its model card or GGUF header; `None` when it names none, or cannot be
    read: a card that somebody else wrote is no reason to fail."""
    try:
        if source.endswith(".gguf"):
            field = GGUFReader(source).get_field("general.license")
            license = field.contents() if field else None
        else:
            card = cached_file(
                source,
                "README.md",
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            license = ModelCard.load(card, ignore_metadata_errors=True).data.license if card else None
    except Exception:
        return None
    return license if isinstance(license, str) else None


def source_name(source: str) -> str:
    """What to call the source in public: a Hub id whole, of a local path only its last part."""
    return Path(source).name if Path(source).exists() else source


def _architecture(config: IHAConfig) -> str:
    """The rows of the card's table."""
    layers = Counter(zip(config.attention_kinds, config.layer_types))
    rows = [
        ("Attention layers", ", ".join(f"{count} {kind} ({geometry})" for (kind, geometry), count in layers.items())),
        ("Heads, key/value heads", f"{config.num_attention_heads}, {config.num_key_value_heads}"),
        ("Hidden size", config.hidden_size),
        ("Context length", config.max_position_embeddings),
    ]
    if config.sliding_window is not None:
        rows.insert(1, ("Sliding window", f"{config.sliding_window} tokens"))
    if "iha" in config.attention_kinds:
        rows += [("Pseudo-heads (P)", config.num_pseudo_heads), ("Pseudo-head positions", config.pseudo_positions)]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)
