"""Export a checkpoint to ONNX, OpenVINO or a program of `torch.export`, by Transformers' own exporters.

An export is two graphs, one that reads prompts and one that adds a token to them. The command runs both, decodes two
prompts of different lengths greedily, and compares every logit with the model's own before it keeps the export.
"""

import argparse
import importlib.util
from typing import NamedTuple

from common.command_io import UserError, checkpoint, new_directory, new_path, run_cli


class Format(NamedTuple):
    """Name what Transformers exports with, and what must be installed for it."""

    exporter: str
    packages: tuple[str, ...] = ()
    options: dict = {}


FORMATS = {
    "dynamo": Format("DynamoExporter"),
    "onnx": Format("OnnxExporter", ("onnx", "onnxscript", "onnxruntime")),
    # A stateful model keeps its cache itself, and takes none from prefill.
    "openvino": Format("OpenVINOExporter", ("openvino",), {"stateful": False}),
}


def parse_arguments() -> argparse.Namespace:
    example = 'example: %(prog)s smollm2-iha smollm2-onnx --format onnx --try "The capital of France is"'
    parser = argparse.ArgumentParser(description=__doc__, epilog=example)
    parser.add_argument("model", type=checkpoint, help="checkpoint of this package: a directory or a Hub id")
    parser.add_argument("out", type=new_path, help="new directory for the export")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to export to; dynamo is torch.export")
    parser.add_argument(
        "--try",
        dest="prompt",
        default="The capital of France is",
        help="text that both continue; the second row of the batch is its first half (default: %(default)r)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=16, help="tokens to decode greedily (default: 16)")
    args = parser.parse_args()
    if args.max_new_tokens < 2:  # the first token takes no step of decoding
        parser.error(f"--max-new-tokens {args.max_new_tokens}: expected at least 2")
    if missing := [name for name in FORMATS[args.format].packages if importlib.util.find_spec(name) is None]:
        how = 'pip install "modeling-iha[export]", or -e ".[export]" in a checkout'
        raise UserError(f"--format {args.format} needs {', '.join(missing)}: {how}.")
    return args


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import importlib.metadata
import logging
import shlex
import shutil
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, exporters

from common.checkpoint_io import load_config, load_model, load_tokenizer
from common.foreign_code import note_foreign_code
from conversion_scripts import run_exported
from conversion_scripts.conversion import check_ours
from conversion_scripts.verify_conversion import Comparison, Run, compare
from kind_facts import described


README = """# {name}

{layers} layers, exported by `python -m conversion_scripts.export {model} {name} --format {format}` in float32:

    pip install {packages}
    python run_exported.py . {prompt}

`run_exported.py` holds the greedy loop over the graphs "prefill" and "decode". Decoding the prompt and its first half
in one batch gave the model's {tokens} greedy tokens; no logit differed by more than {difference:.1e}.
"""


def sample_inputs(model: PreTrainedModel) -> dict[str, dict]:
    """Return the inputs that the two graphs are traced with: 2 rows of 5 and 11 tokens, and the next token of each.

    Tracing fixes sizes of 1, and drops a mask without padding.
    """
    input_ids, attention_mask = run_exported.pad_left([[0] * 5, [0] * 11])
    position_ids = run_exported.token_positions(attention_mask)
    prefill = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    # Transformers traces sliding layers of a cache as layers that keep all tokens; the mask applies the window.
    cache = DynamicCache()
    with torch.no_grad():
        model(**prefill, past_key_values=cache, use_cache=True)
    following = torch.zeros_like(input_ids[:, :1], memory_format=torch.contiguous_format)
    longer_mask = torch.cat((attention_mask, torch.ones_like(following)), dim=1)
    positions = run_exported.next_positions(longer_mask)
    decode = {"input_ids": following, "attention_mask": longer_mask, "position_ids": positions}
    return {
        "prefill": {**prefill, "past_key_values": DynamicCache(), "use_cache": True},
        "decode": {**decode, "past_key_values": cache, "use_cache": True},
    }


def dynamic_shapes(inputs: dict) -> dict:
    """Return the axes that vary: the batch, the tokens of a prompt, and those of the mask and the cache."""
    auto = torch.export.Dim.AUTO
    tokens = {0: auto, 1: auto} if inputs["input_ids"].shape[1] > 1 else {0: auto}
    cached = [{0: auto, 2: auto} for layer in inputs["past_key_values"].layers for _ in range(2)]
    mask = {0: auto, 1: auto}
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": tokens, "past_key_values": cached}


def export(model: PreTrainedModel, export_format: str) -> "exporters.ExportedModel":
    """Return the graphs `"prefill"` and `"decode"` of `model`, for any number of rows and tokens."""
    # They name missing companions of PyTorch, and versions that they were not tried with, at every start.
    for library in ("torch.onnx", "transformers.exporters"):
        logging.getLogger(library).setLevel(logging.ERROR)
    exporter = getattr(exporters, FORMATS[export_format].exporter)()
    components = {}
    for name, inputs in sample_inputs(model).items():
        print(f"Exporting {name}", flush=True)
        config = exporter.config_class(dynamic_shapes=dynamic_shapes(inputs), **FORMATS[export_format].options)
        components[name] = exporter.export(model, inputs, config).components["model"]
    return exporters.ExportedModel(components, export_format, model.config, model.generation_config)


@torch.no_grad()
def verify(
    model: PreTrainedModel, exported: "exporters.ExportedModel", prompts: list[list[int]], max_new_tokens: int
) -> Comparison:
    """Decode prompts of token ids with `exported`, and compare with one forward of `model` without a cache."""
    tokens, logits = run_exported.greedy(exported, prompts, max_new_tokens, stop=set())
    input_ids, mask = run_exported.pad_left(prompts)
    input_ids = torch.cat((input_ids, tokens), dim=1)[:, :-1]
    mask = torch.cat((mask, torch.ones_like(tokens)), dim=1)[:, :-1]
    positions = run_exported.token_positions(mask)
    output = model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    expected = output.logits[:, -max_new_tokens:]
    reference = Run(expected.flatten(0, 1), expected.argmax(-1).flatten())
    return compare(reference, Run(logits.flatten(0, 1), tokens.flatten()))


def main() -> None:
    args = parse_arguments()
    config = load_config(args.model)
    check_ours(args.model, config)
    tokenizer = load_tokenizer(args.model, config.vocab_size)
    prompt = tokenizer(args.prompt).input_ids
    if not prompt:
        raise UserError(f"--try {args.prompt!r} has no tokens: give a longer text.")
    note_foreign_code(args.model)
    with new_directory(args.out) as directory:
        print(f"Reading {args.model}", flush=True)
        model = load_model(args.model, torch.float32)
        exported = export(model, args.format)
        exported.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        shutil.copy(run_exported.__file__, directory)
        print(f"Decoding {args.max_new_tokens} tokens after {args.prompt!r} and its first half", flush=True)
        half = prompt[: (len(prompt) + 1) // 2]
        result = verify(model, run_exported.load(directory), [prompt, half], args.max_new_tokens)
        figures = f"{result.greedy_agreement} of {result.greedy_tokens} greedy tokens are the model's"
        figures += f", max |dlogit| {result.max_logit_difference:.1e}"
        if not result.passed:
            expected = f"expected all, and less than {result.allowed_difference:g}"
            raise UserError(f"The export does not compute what {args.model} does: {figures}; {expected}.")
        packages = ("transformers", "torch", *FORMATS[args.format].packages)
        readme = README.format(
            name=Path(args.out).absolute().name,
            layers=", ".join(f'"{kind}"' for kind in dict.fromkeys(described(config).attention_kinds)),
            model=Path(args.model).absolute().name if Path(args.model).exists() else args.model,
            format=args.format,
            packages=" ".join(f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in packages),
            prompt=shlex.quote(args.prompt),
            tokens=result.greedy_tokens,
            difference=result.max_logit_difference,
        )
        (directory / "README.md").write_text(readme, encoding="utf-8")
    print(f"Wrote {args.out}: {figures}.")
    print(f"Run it: {shlex.join(['python', str(Path(args.out) / 'run_exported.py'), str(args.out), args.prompt])}")


if __name__ == "__main__":
    run_cli(main)
