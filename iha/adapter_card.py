"""Write the model card of an adapter of `save_adapter`: what it was trained on, and how to load and merge it."""

from pathlib import Path

from huggingface_hub import ModelCardData

from iha.cards import markdown, name_of_place, origin_of, source_name, title_of


TEMPLATE = """---
{metadata}
---

# {title}

LoRA adapters of {base}, trained with interleaved heads, and the mixing of these heads. `load_adapter` of the package
modeling-iha interleaves the base and loads both. PEFT alone would silently leave the mixing out.

```python
from transformers import AutoModelForCausalLM
from modeling_iha import load_adapter

base = AutoModelForCausalLM.from_pretrained("{base_place}", dtype="float32")
model = load_adapter(base, "{place}")
model.merge_and_unload().save_pretrained("merged")  # a whole model, to publish or to serve
```
"""


def write_adapter_card(directory: str | Path, base: str, place: str | None = None) -> None:
    """Write the card of an adapter in a directory, in the place of TRL's. The base is a directory or a Hub id.

    `place` is the name of the directory that the card shows, if it will get another one.
    """
    is_local = Path(base).exists()
    base_model = origin_of(base).base_model if is_local else base
    data = ModelCardData(library_name="peft", tags=["iha", "lora"], base_model=base_model)
    place = place or name_of_place(directory)
    card = TEMPLATE.format(
        metadata=data.to_yaml(),
        title=markdown(title_of(place)),
        base=markdown(source_name(base)),
        base_place=name_of_place(base) if is_local else base,
        place=place,
    )
    Path(directory, "README.md").write_text(card, encoding="utf-8")
