"""Time and peak memory of a sliding "iha" layer on SDPA: in blocks of queries, as the model runs it, against SDPA with a dense mask.

Forward of one layer (width 512, 8 heads) on one CPU thread, fp32. Times are interleaved, medians of --repeats; each peak is from a process of
its own. Writes window_layer.json and window_layer.png to benchmarks/results.

example: python benchmarks/window_layer.py --tokens 1024 2048 4096
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from matplotlib.figure import Figure


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_iha import IHAConfig, IHAModel, virtual_sequence  # noqa: E402


RESULTS = Path(__file__).parent / "results"
FORMS = {"blocks": virtual_sequence._window_documents, "dense mask": lambda *_: None}


def forward(form: str, tokens: int, pseudo_heads: int, window: int) -> float:
    """Seconds of one forward of a fresh layer."""
    virtual_sequence._window_documents = FORMS[form]
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 8}
    layer = {"num_hidden_layers": 1, "num_pseudo_heads": pseudo_heads}
    config = IHAConfig.from_preset("tiny", **sizes, **layer, layer_types="sliding_attention", sliding_window=window)
    model = IHAModel(config).eval()
    hidden_states = torch.randn(1, tokens, 512)
    start = time.perf_counter()
    with torch.no_grad():
        model(inputs_embeds=hidden_states, use_cache=False)
    return time.perf_counter() - start


def peak_bytes() -> int:
    """The most memory this process has held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def extra_memory(form: str, *sizes: int) -> int:
    """Bytes by which a forward raises the peak of a process of its own."""
    command = [sys.executable, __file__, "--one", form, *map(str, sizes)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(tokens: int, pseudo_heads: int, window: int, repeats: int) -> dict:
    sizes = (tokens, pseudo_heads, window)
    seconds = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form in FORMS:
            seconds[form].append(forward(form, *sizes))
    row = {"tokens": tokens}
    for form in FORMS:
        row[form] = {"seconds": statistics.median(seconds[form]), "extra_bytes": extra_memory(form, *sizes)}
    for figure in ("seconds", "extra_bytes"):
        row[f"{figure}_ratio"] = row["blocks"][figure] / row["dense mask"][figure]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--pseudo-heads", type=int, default=4)
    parser.add_argument("--window", type=int, default=128, help="in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        form, *sizes = args.one
        forward(form, 8, *map(int, sizes[1:]))
        before = peak_bytes()
        forward(form, *map(int, sizes))
        print(peak_bytes() - before)
        return

    rows = []
    for tokens in args.tokens:
        rows.append(measure(tokens, args.pseudo_heads, args.window, args.repeats))
        print(
            f"{tokens} tokens: {rows[-1]['seconds_ratio']:.3f} of the time, {rows[-1]['extra_bytes_ratio']:.3f} of the memory"
        )
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    setting = {"pseudo_heads": args.pseudo_heads, "window": args.window, "threads": 1, "dtype": "float32", **versions}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "window_layer.json").write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")

    figure = Figure(figsize=(9, 4))
    panels = {"seconds": "forward, seconds", "extra_bytes": "extra memory, bytes"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items()):
        for form in FORMS:
            axes.loglog([row["tokens"] for row in rows], [row[form][key] for row in rows], marker="o", label=form)
        axes.set(xlabel="tokens", ylabel=label)
        axes.legend()
    figure.suptitle(f"Window layer, P = {args.pseudo_heads}, W = {args.window} tokens, one CPU thread")
    figure.tight_layout()
    figure.savefig(RESULTS / "window_layer.png", dpi=100)


if __name__ == "__main__":
    main()
