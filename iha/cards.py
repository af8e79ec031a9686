"""Give a checkpoint's model card the name under which it is published, or the results of `python -m evaluation.run`.

The converters and trainers write the card: one template, filled from the config and from how the model was made.

example: python -m iha.cards smollm2-iha --name me/smollm2-iha --results outputs/evaluation/smollm2-iha
"""

import argparse
import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from annotated_types import Ge, Interval
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import AutoModel
from transformers.utils import cached_file
from typing_extensions import TypedDict

from iha.checkpoints import fingerprint, positions_of
from iha.errors import UserError, refusing, run_cli
from iha.files import expanded, parse_yaml, read_json, read_text, whole_file
from iha.kinds import additions_of, companion_of, described, own_modules, virtual_tokens_per_token
from iha.model_cost import model as cost_of_model
from iha.model_cost import with_mha
from iha.sources import find_source
from modeling_iha import IHAConfig
from modeling_iha.mixing_weights import trained_mixing


TEMPLATE = Path(__file__).with_name("card_template.md")
MAX_CARD = 2**20  # bytes
NOT_EVALUATED = "Not evaluated."
FINAL = "final"  # the directory of a run that `sft.train` saves the final model in
FROM_SCRATCH = "trained-from-scratch"  # the tag of a model without a base model


# The parts of a results.json of `python -m evaluation.run` that cards and comparisons read


Count = Annotated[int, Interval(ge=0, le=10**12)]
Number = Annotated[float, Interval(ge=-1e12, le=1e12)]  # NaN is outside


class Figure(TypedDict):
    value: Number
    stderr: Annotated[Number, Ge(0)] | None


class Task(TypedDict):
    metrics: dict[str, Figure]
    examples: Count
    samples_each: Count
    unfinished_replies: Count
    note: NotRequired[str]


class Results(TypedDict):
    checkpoint: str
    suite: str
    seed: int
    model_dtype: str
    device: str
    commit: str
    versions: dict[str, str]
    data_sha256: dict[str, str]
    tasks: dict[str, Task]


# Text for cards


def metadata(card: str, source: str | os.PathLike) -> dict:
    """Return the metadata of a card, given as the text of a README.md.

    Raise `UserError` for YAML that `read_yaml` rejects.
    """
    block = REGEX_YAML_BLOCK.search(card)
    return (block and parse_yaml(block[2], f"The metadata of {source}", dict | None)) or {}


def parse_card(card: str, source: str | os.PathLike = "the card") -> ModelCard:
    """Return the card of a text, whose lines may end as on Windows.

    Raise `UserError` for metadata that `metadata` or the Hub's library rejects.
    """
    card = card.replace("\r\n", "\n")
    metadata(card, source)
    with refusing(f"The metadata of {source} cannot be read", AttributeError, KeyError, TypeError, ValueError):
        return ModelCard(card)


def one_printable_line(text: object) -> str:
    """Return `text` on one line, with single blanks and U+FFFD for every character that does not print."""
    line = " ".join(str(text).split())
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def markdown(text: object) -> str:
    """Return `text` on one line, escaped so that Markdown shows it as it stands."""
    # An underscore between letters is no markup.
    return re.sub(r"[\\`*\[\]<>|#~$&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", one_printable_line(text))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def is_share(metric: str) -> bool:
    """Return whether a figure is a share, which is written in per cent, and no loss."""
    return "loss" not in metric and metric != "bits_per_byte"


def figure_text(figure: dict | None, percent: bool) -> str:
    if figure is None:
        return "–"
    scale, digits = (100, 1) if percent else (1, 3)
    error = "" if figure["stderr"] is None else f" ± {scale * figure['stderr']:.{digits}f}"
    return f"{scale * figure['value']:.{digits}f}{error}"


# The cards of converters and trainers


def render_card(
    config: Any,
    name: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    datasets: list[str] | None = None,
    from_scratch: bool = False,
    details: str = "",
) -> str:
    """Return a checkpoint's README.md: metadata for the Hub, how to use the model, and its attention layers.

    Its title and the usage example have `name`, that of a directory or a Hub id. `base_model`, `license` and
    `datasets` are identifiers of the Hub; the license "other" has a name and a link. A model `from_scratch` gets a tag
    that says so. `details` are Markdown sections on how the checkpoint was made and what holds for it.
    """
    name = one_printable_line(name)
    tags = ["custom_code", "iha"]
    shown = described(config)
    if "iha" in shown.attention_kinds:
        tags.append("interleaved-head-attention")
    if from_scratch:
        tags.append(FROM_SCRATCH)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        base_model=base_model,
        license=license,
        license_name=license_name,
        license_link=license_link,
        datasets=datasets,
    )
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    modules = own_modules(model)
    adapters = ["--lora_target_modules", "all-linear", *(["--lora_modules_to_save", *modules] if modules else [])]
    positions = positions_of(shown)
    length = min(16384, positions or 16384)
    # The recipe states these keys, and a checkpoint may need others.
    recipe_keys = [f"--max_length {length}", f"--num_pseudo_heads {virtual_tokens_per_token(shown)}"]
    if not trained_mixing(model):
        recipe_keys.append("--mixing_scale 1")
    kinds = {kind: companion_of(kind) for kind in dict.fromkeys(shown.attention_kinds)}
    additions = additions_of(shown)
    mechanisms = [f'- "{kind}": {known.card.format(config=shown)}' for kind, known in kinds.items()]
    mechanisms += [f"- in every layer {addition.card.format(config=shown)}" for addition in additions]
    papers = [known.paper for known in (*kinds.values(), *additions) if known.paper]
    of_all_tokens = {kind for kind, each in zip(shown.attention_kinds, shown.layer_types) if each == "full_attention"}
    virtual = {kind: known for kind, known in kinds.items() if kind in of_all_tokens and known.times_pairs}
    return str(
        ModelCard.from_template(
            data,
            template_path=str(TEMPLATE),
            title=markdown(name),
            python_name=json.dumps(name, ensure_ascii=False),
            shell_name=shlex.quote(name),
            recipe_keys=" ".join(recipe_keys),
            adapters=" ".join(adapters),
            mechanisms="\n".join(mechanisms),
            schedule=drawn_layers(shown),
            details=details.strip(),
            evaluation=NOT_EVALUATED,
            costs=_costs(shown),
            context=positions and f"{positions:,}",
            is_iha=isinstance(shown, IHAConfig),
            in_vllm=all(known.served_by_vllm for known in (*kinds.values(), *additions)),
            kinds=list(kinds),
            times_pairs={kind: known.times_pairs(shown) for kind, known in virtual.items()},
            weights_license=license and markdown(license_name or license),
            papers="\n".join(dict.fromkeys(f"- {paper}" for paper in papers)),
        )
    )


# Keys of a card's metadata. The last two belong to the license "other".
LICENSE_KEYS = ("license", "license_name", "license_link")


def source_license(source: str) -> dict[str, str]:
    """Return what the model card of a checkpoint, or its GGUF header, states of `LICENSE_KEYS`.

    A card that cannot be read states nothing, because a stranger's card is no reason to fail.
    """
    if not source.endswith(".gguf"):
        card = _metadata_of(source)
        return {name: one_printable_line(card[name]) for name in LICENSE_KEYS if isinstance(card.get(name), str)}
    from gguf import GGUFReader  # here: a plain installation lacks it

    try:
        field = GGUFReader(source).get_field("general.license")
        return {"license": one_printable_line(field.contents())} if field else {}
    except Exception:
        return {}


def source_base_model(source: str) -> str | None:
    """Return the Hub id `source` itself, or the base model that the card of a local directory names, or `None`."""
    if not Path(source).exists():
        return source
    stated = _metadata_of(source).get("base_model")
    return one_printable_line(stated) if isinstance(stated, str) else None


def is_from_scratch(source: str) -> bool:
    """Return whether the card of a local directory says that its model was trained from scratch."""
    tags = _metadata_of(source).get("tags") if Path(source).is_dir() else None
    return isinstance(tags, list) and FROM_SCRATCH in tags


def _metadata_of(source: str) -> dict:
    """Return the metadata of a checkpoint's card, or an empty dict for a card that cannot be read."""
    if Path(source).is_file():  # a GGUF file: as an id of the Hub it would be asked for again and again
        return {}
    try:
        path = cached_file(source, "README.md")
        return metadata(read_text(path, MAX_CARD), path)
    except Exception:
        return {}


def source_name(source: str) -> str:
    """Return the public name of a source on one line: the whole Hub id, or the last part of a local path.

    The final model of a run has the name of the run.
    """
    if not os.path.exists(os.path.expanduser(source)):
        return one_printable_line(source)
    path = Path(os.path.abspath(os.path.expanduser(source)))
    return one_printable_line(path.parent.name if path.name == FINAL else path.name)


def drawn_layers(config: Any) -> str:
    """Draw the layers in text: a row for each kind of layer, a column for each layer."""
    layers = list(zip(config.attention_kinds, config.layer_types))
    reach = {"full_attention": "all tokens", "sliding_attention": f"window of {config.sliding_window} tokens"}
    rows = {layer: f"{layer[0]}, {reach.get(layer[1], layer[1])}" for layer in dict.fromkeys(layers)}
    width = max(map(len, rows.values()))
    lines = [f"{'layer':<{width}}  {''.join(f'{number:<5}' for number in range(0, len(layers), 5))}".rstrip()]
    for row, label in rows.items():
        lines.append(f"{label:<{width}}  {''.join('█' if layer == row else '·' for layer in layers)}")
    return "\n".join(lines)


def _costs(config: Any) -> str | None:
    """Return the table of predicted costs next to the same model with "mha" over all tokens in every layer.

    It is `None` where the cost model does not know a layer.
    """
    if not isinstance(config, IHAConfig) or not all(companion_of(kind).cost for kind in config.attention_kinds):
        return None
    tokens = config.max_position_embeddings
    ours, mha = (cost_of_model(each, tokens) for each in (config, with_mha(config, "full_attention")))
    titles = [
        "Parameters",
        "FLOPs of a forward",
        "FLOPs of a training step",
        "FLOPs of one more token",
        "Values in the KV cache",
    ]

    def written(title: str, cost: int) -> str:
        return _short(2 * cost) if "FLOPs" in title else f"{cost:,}"  # two FLOPs for each multiply-add

    rows = [
        [title, written(title, a), written(title, b), f"{a / b:.3f}"]
        for title, a, b in zip(titles, astuple(ours), astuple(mha))
    ]
    return markdown_table(["", "this model", "mha", "ratio"], rows).rstrip()


def _short(number: float) -> str:
    """Return a large number in four digits, such as "45.38 T"."""
    units = ("", "k", "M", "G", "T", "P", "E")
    thousands = min(max(0, int(math.log10(number)) // 3), len(units) - 1)
    return f"{number / 1000**thousands:.4g} {units[thousands]}".rstrip()


# Changes by an evaluation or a publication


def with_name(card: str, name: str) -> str:
    """Return a `card` of `render_card` with another name in its title, its examples and its metadata.

    Such a name is the Hub id under which the checkpoint is published. A stranger's card stays as it is, and so does a
    title that somebody has given the card.
    """
    name = one_printable_line(name)
    edited = parse_card(card)
    in_shell = re.search(r"^name=(.*)$", edited.text, re.MULTILINE)
    former = ""
    if in_shell:
        with suppress(ValueError):  # a quote that a stranger's line leaves open
            former = " ".join(shlex.split(in_shell[1]))
    in_python = f"name = {json.dumps(former, ensure_ascii=False)}"
    if in_shell is None or in_python not in edited.text.splitlines():
        return card  # with its metadata, of which a ModelCard drops what it does not know
    lines = {
        in_python: f"name = {json.dumps(name, ensure_ascii=False)}",
        in_shell[0]: f"name={shlex.quote(name)}",
        f"# {markdown(former)}": f"# {markdown(name)}",  # unless somebody has given the card another title
    }
    edited.text = "\n".join(lines.get(line, line) for line in edited.text.split("\n"))
    if edited.data.get("eval_results"):
        edited.data["model_name"] = name
    return str(edited)


def with_results(card: str, name: str, results: dict) -> str:
    """Return the `card` with `results` of `python -m evaluation.run` as its section on evaluation.

    Its metadata gets the figures of `_model_index`.
    """
    edited = parse_card(card)
    section = f"## Evaluation\n\n{_evaluation(results)}\n\n"
    edited.text, replaced = re.subn(
        r"^## Evaluation\n.*?(?=^## |\Z)", lambda _: section, edited.text, count=1, flags=re.MULTILINE | re.DOTALL
    )
    if not replaced:
        edited.text = f"{edited.text.rstrip()}\n\n{section}"
    model_index = _model_index(results) or None
    edited.data["eval_results"] = model_index
    edited.data["model_name"] = one_printable_line(name) if model_index else None
    return str(edited)


def _evaluation(results: dict) -> str:
    """Return a table with a row for each metric, and a line on how the figures were measured."""
    rows = []
    for name, task in results["tasks"].items():
        remarks = [task["note"]] if "note" in task else []
        remarks += [f"{task['unfinished_replies']} replies unfinished"] if task["unfinished_replies"] else []
        counts = [str(task["examples"]), str(task["samples_each"]), markdown("; ".join(remarks))]
        for metric, figure in task["metrics"].items():
            rows.append([markdown(name), markdown(metric), figure_text(figure, is_share(metric)), *counts])
    header = ["task", "metric", "this model ± s.e.", "examples", "samples each", "remarks"]
    versions = ", ".join(f"{library} {number}" for library, number in results["versions"].items())
    about = (
        "± is the standard error over the examples; losses are in nats, bits per byte in bits, other figures in per "
        f"cent. Suite {results['suite']}, seed {results['seed']}, {results['model_dtype']} on {results['device']}, "
        f"code of commit {results['commit'][:12]}; {versions}."
    )
    return f"{markdown_table(header, rows)}\n{markdown(about)}"


def _model_index(results: dict) -> list[EvalResult]:
    """Return the figures for the card's metadata.

    They exclude the smoke suite, which says nothing about a model, and figures that are not comparable with published
    ones.
    """
    if results["suite"] == "smoke":
        return []
    comparable = {name: task for name, task in results["tasks"].items() if "note" not in task}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name.partition("@")[0],
            dataset_name=name,
            metric_type=metric,
            metric_value=figure["value"],
            metric_args={"examples": task["examples"], "standard_error": figure["stderr"]},
        )
        for name, task in comparable.items()
        for metric, figure in task["metrics"].items()
    ]


def update(directory: Path, name: str | None = None, results: dict | None = None) -> None:
    """Rewrite the card of the checkpoint `directory` with another name, or with results.

    Raise `UserError` for results of another checkpoint.
    """
    path = directory / "README.md"
    if path.is_symlink():
        raise UserError(f"{path} is a link, and a file elsewhere would change: put the file itself there.")
    card = read_text(path, MAX_CARD)
    if name is not None:
        card = with_name(card, name)
    if results is not None:
        if results["checkpoint"] != fingerprint(find_source(directory)):
            raise UserError(f"The results are of another checkpoint than {directory}: evaluate this one.")
        card = with_results(card, name or directory.resolve().name, results)
    with whole_file(path) as temporary:
        temporary.write_text(card, encoding="utf-8")


def read_results(path: Path) -> dict:
    """Return the results.json of `python -m evaluation.run`, given itself or by its directory.

    Raise `UserError`.
    """
    return read_json(path / "results.json" if path.is_dir() else path, Results)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=expanded, help="checkpoint with its card, README.md")
    parser.add_argument("--name", help="what the card is called and its examples load, such as me/smollm2-iha")
    parser.add_argument(
        "--results", type=expanded, help="output directory of python -m evaluation.run, or its results.json"
    )
    args = parser.parse_args(argv)
    if args.name is None and args.results is None:
        raise UserError("Nothing to do: give --name, --results or both.")
    update(args.dir, args.name, None if args.results is None else read_results(args.results))
    print(f"Wrote {args.dir / 'README.md'}")


if __name__ == "__main__":
    run_cli(main)
