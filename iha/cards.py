"""Give a checkpoint's model card the name under which it is published, or the results of `python -m evaluation.run`.

The converters and trainers write the card: see iha/card_template.py.

example: python -m iha.cards smollm2-iha --name me/smollm2-iha --results outputs/evaluation/smollm2-iha
"""

import argparse
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from typing_extensions import TypedDict

from iha.errors import UserError, refusing, run_cli
from iha.files import expanded, read_json, read_text, whole_file
from iha.sources import find_source


NOT_EVALUATED = "Not evaluated."
LIMITS_OF_BASE = "The limits of the base model remain."
FINAL = "final"  # the directory of a run that `sft.train` saves the final model in
FROM_SCRATCH = "trained-from-scratch"  # the tag of a model without a base model
# Keys of a card's metadata. The last two belong to the license "other".
LICENSE_KEYS = ("license", "license_name", "license_link")


class Results(TypedDict):
    """Hold what a card says of a results.json of `python -m evaluation.run`."""

    checkpoint: str
    suite: str
    seed: int
    model_dtype: str
    device: str
    commit: str
    versions: dict[str, str]
    tasks: dict[str, dict]


# Text for cards


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


# What a card says of its checkpoint


def parse_card(card: str, source: str | os.PathLike = "the card") -> ModelCard:
    """Return the card of a text, whose lines may end as on Windows. Raise `UserError` for wrong metadata."""
    with refusing(f"The metadata of {source} cannot be read", Exception):  # the type depends on what is wrong
        return ModelCard(card.removeprefix("\ufeff").replace("\r\n", "\n"))


def _metadata_of(source: str) -> dict:
    """Return the metadata of a checkpoint's card, or an empty dict for a card that cannot be read.

    A stranger's card is no reason to fail.
    """
    try:
        path = Path(source, "README.md") if Path(source).is_dir() else hf_hub_download(source, "README.md")
        return parse_card(read_text(path), path).data.to_dict()
    except Exception:
        return {}


class Origin(NamedTuple):
    """Hold where weights come from, as far as it is known: as a card says it, or as a card has to be told.

    Attributes:
        license: what is known of `LICENSE_KEYS`.
        base_model: the Hub id of the model that they were made from, or `None` if none is known.
        from_scratch: whether they were trained from scratch, and so there is no base model.
    """

    license: dict[str, str]
    base_model: str | None = None
    from_scratch: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """Return the entries of a card's metadata that say it, without the tag of a model from scratch."""
        return self.license if self.base_model is None else {**self.license, "base_model": self.base_model}


def origin_of(source: str) -> Origin:
    """Return where a model comes from that is made from a checkpoint: a Hub id, a directory or a GGUF file.

    A checkpoint on the Hub is its base model. A local one has the base model of its card, or was trained from scratch
    if the card says so.
    """
    if source.endswith(".gguf"):
        return Origin(_gguf_license(source))
    card = _metadata_of(source)
    license = {name: one_printable_line(card[name]) for name in LICENSE_KEYS if isinstance(card.get(name), str)}
    if not Path(source).exists():
        return Origin(license, source)
    if FROM_SCRATCH in (card.get("tags") or []):
        return Origin(license, from_scratch=True)
    base = card.get("base_model")
    return Origin(license, one_printable_line(base) if isinstance(base, str) else None)


def _gguf_license(file: str) -> dict[str, str]:
    """Return what the header of a GGUF file states of `LICENSE_KEYS`."""
    from gguf import GGUFReader  # here: a plain installation lacks it

    field = GGUFReader(file).get_field("general.license")
    return {"license": one_printable_line(field.contents())} if field else {}


def source_name(source: str) -> str:
    """Return the public name of a source on one line: the whole Hub id, or the last part of a local path.

    The final model of a run has the name of the run.
    """
    return title_of(os.path.abspath(expanded(source)) if expanded(source).exists() else source)


def name_of_place(directory: str | os.PathLike) -> str:
    """Return the name by which a card loads a directory: its path as seen from here, or its last part from elsewhere.

    It begins with "./", because the Hub would be asked for any other name if the directory were missing.
    """
    path = Path(os.path.relpath(expanded(directory)))
    if ".." in path.parts:
        path = Path(path.parent.name if path.name == FINAL else "", path.name)
    return f"./{path}"


def title_of(name: str) -> str:
    """Return what a model is called that is loaded by `name`: a Hub id, or a path that begins with "/" or "./"."""
    if not name.startswith(("/", "./")):
        return one_printable_line(name)
    path = Path(name)
    return one_printable_line(path.parent.name if path.name == FINAL else path.name)


def license_text(license: str | None) -> str:
    """Return what a card says of the licenses of its code and of its weights, in Markdown."""
    weights = f"The weights are under {markdown(license)}." if license else "No license of the weights is known."
    return f"The code in this repository is under Apache-2.0. {weights}"


# Changes by a publication or an evaluation


def origin_to_add(directory: Path, license: str | None, base_model: str | None) -> Origin:
    """Return what a user gave of the origin of a checkpoint and its card lacks, to be added before it is published.

    `None` stands for what the card states already. A `base_model` of "none" says that there is none, as the tag of a
    card from scratch does. Raise `UserError` if neither the card nor the user names the license or the base model, and
    if the two name different ones.
    """
    path = directory / "README.md"
    card = parse_card(read_text(path), path).data if path.is_file() else ModelCardData()
    tagged = "none" if FROM_SCRATCH in (card.get("tags") or []) else None
    license = _to_add(path, "license", card.get("license"), license, "--license")
    base_model = _to_add(path, "base_model", card.get("base_model") or tagged, base_model, "--base-model")
    known = {} if license is None else {"license": license}
    return Origin(known, from_scratch=True) if base_model == "none" else Origin(known, base_model)


def _to_add(path: Path, name: str, stated: Any, given: str | None, option: str) -> str | None:
    """Return what is given of an entry that the card at `path` does not state, or `None`. Raise `UserError`."""
    stated_values = stated if isinstance(stated, list) else [stated]  # a card may name several base models
    if stated and given is not None and [given] != stated_values:
        raise UserError(f"{path} states {name} {stated!r}, and {option} says {given!r}: correct one of them.")
    if not stated and given is None:
        hint = " (none: trained from scratch)" if name == "base_model" else ""
        raise UserError(f"The card of {path.parent} does not state its {name}: add it, or give {option}{hint}.")
    return None if stated else given


def with_origin(card: str, origin: Origin) -> str:
    """Return a `card` that also says this of the origin of its weights, or as it stands if it does. Raise `UserError`.

    A card of `render_card` has the license and the limits of the base model in its text, too.
    """
    if not origin.metadata and not origin.from_scratch:
        return card
    edited = parse_card(card)
    for name, value in origin.metadata.items():
        edited.data[name] = value
    license = origin.license.get("license")
    edited.text = edited.text.replace(f"\n{license_text(None)}\n", f"\n{license_text(license)}\n")
    tags = edited.data.get("tags") or []
    if origin.from_scratch and FROM_SCRATCH not in tags:
        edited.data["tags"] = [*tags, FROM_SCRATCH]
    if origin.from_scratch:
        edited.text = edited.text.replace(f" {LIMITS_OF_BASE}", "")
    return str(edited)


def with_name(card: str, name: str) -> str:
    """Return a `card` of `render_card` with another name in its title, its examples and its metadata.

    Such a name is the Hub id under which the checkpoint is published. A stranger's card stays as it is, and so does a
    title that somebody has given the card.
    """
    name = one_printable_line(name)
    edited = parse_card(card)
    in_python = re.search(r'^name = "(.*)"$', edited.text, re.MULTILINE)
    former = in_python[1] if in_python else ""
    if f"\nname={shlex.quote(former)}\n" not in edited.text:
        return card  # with its metadata, of which a ModelCard drops what it does not know
    for old, new in (
        (f'name = "{former}"', f"name = {json.dumps(name, ensure_ascii=False)}"),
        (f"name={shlex.quote(former)}", f"name={shlex.quote(name)}"),
        (f"# {markdown(title_of(former))}", f"# {markdown(name)}"),  # unless somebody has given the card another title
    ):
        edited.text = edited.text.replace(f"\n{old}\n", f"\n{new}\n", 1)
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
    card = read_text(path)
    if name is not None:
        card = with_name(card, name)
    if results is not None:
        from iha.checkpoints import fingerprint  # here: PyTorch takes seconds, and `push` reads cards before it

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
