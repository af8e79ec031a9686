import gc
import os
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path


# Each collection would walk through all that the imports make.
gc.disable()

# The test models are tiny: more threads than one cost more than they give, most of all with several processes at a
# time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each load of a dataset and each library would be counted on the Hub, and without a network each count waits.
os.environ |= {"HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
# Triton reads this when it is imported. Without a GPU its interpreter runs the kernels.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tests compare kernels too that are off because no GPU has run them.
os.environ.setdefault("IHA_TRITON_KERNELS", "all")

import pytest  # noqa: E402
from clean_processes import Forking  # noqa: E402


try:
    from hypothesis import settings
except ImportError:  # where only tests run that draw nothing, as on a GPU
    pass
else:
    # `make test` draws the same cases each time, and `make test-full` others (`--hypothesis-profile full`).
    settings.register_profile("quick", derandomize=True, deadline=None, database=None, max_examples=50)
    settings.register_profile("full", deadline=None, database=None, max_examples=1000, print_blob=True)
    settings.load_profile("quick")


# pytest reads this file in the process that starts the others too, and waits for it: what takes seconds to import is
# imported where it is used.
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run a command in this process, as `helpers.command` does."""
    from helpers import command

    return partial(command, monkeypatch, capsys)


# The tests of `make gpu` need not wait for what tiny_training.py imports.


@pytest.fixture(autouse=True)
def same_numbers():
    """Draw the same numbers whatever ran before, so that a test that fails fails again alone."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_cores():
    """Undo what `helpers.set_core` chose when the test ends."""
    yield
    if helpers := sys.modules.get("helpers"):
        helpers.forget_cores()


@pytest.fixture
def in_repository_root(monkeypatch):
    """Start where recipes name their chat templates from, as the documented command does."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> str:
    """Write 20 rows to fine-tune on."""
    from tiny_training import training_rows, write_jsonl

    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", training_rows(20))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """Save a tiny model of two "iha" layers, and a tokenizer of bytes."""
    import torch
    from tiny_training import preset_config, saved

    from modeling_iha import IHAForCausalLM

    torch.manual_seed(0)
    return saved(IHAForCausalLM(preset_config()), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cpu_cores(monkeypatch):
    """Run every attention core on a CPU, and yield the calls of the stand-in for flash.

    FlexAttention runs uncompiled: the same mathematics without minutes of compilation.
    """
    import fake_flash
    import torch

    calls = fake_flash.install(monkeypatch)
    with torch.compiler.set_stance("force_eager"):
        yield calls


@pytest.fixture
def small_blocks(monkeypatch):
    """Take queries in blocks of 4, so that a short input has several, the last of them short."""
    from modeling_iha import attention_hyper, score_matrix, sdpa_in_blocks, tuple_attention

    monkeypatch.setattr(score_matrix, "BLOCK", 4)
    monkeypatch.setattr(tuple_attention, "PAIR_BLOCK", 4)
    monkeypatch.setattr(sdpa_in_blocks, "LEAST_BLOCK", 4)
    monkeypatch.setattr(attention_hyper, "CHUNK", 4)


# The files that take longest, in this order: begun first, none of them keeps one process busy while the other is idle
# at the end.
LONGEST = (
    "test_cost",
    "test_readme",
    "test_conversion",
    "test_compile",
    "test_evaluation",
    "test_distributed",
    "test_shared_rows",
    "test_training_run",
    "test_drawn",
    "test_protocol",
    "test_fine_tune",
    "test_transformers_suite",
    "test_model_types",
    "test_speedrun",
    "test_hub",
    "test_model_cards",
    "test_triton_kernels",
    "test_mechanisms",
    "test_push",
    "test_adapters",
    "test_pull",
    "test_interleave",
    "test_interleaved",
    "test_decoding_kernels",
    "test_saved",
    "test_make_gpu",
    "test_recompute",
    "test_commands",
    "test_sdpa_in_blocks",
    "test_peft",
    "test_interleaved_checkpoints",
    "test_sft",
    "test_surroundings",
    "test_trl",
    "test_notebook",
    "test_declared",
    "test_recipes",
    "test_mixing_scale",
)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def forked_processes(tmp_path_factory):
    """Fork the clean processes of this session from one that has imported Transformers."""
    from iha import processes

    forking = Forking(processes._start, tmp_path_factory.mktemp("clean-parent"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_start", forking.start)
        yield forking
    forking.stop()


@pytest.fixture
def new_processes(forked_processes, monkeypatch):
    """Have the clean processes of a test start anew, as those of users do."""
    monkeypatch.setattr(forked_processes, "is_off", True)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    # Each later collection would walk through all that imports and earlier files have left, and several libraries
    # collect often.
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # nanobind lists what is frozen as leaks


def spared(items):
    """Yield the cases that `one_of(n)` leaves to `make test-full`.

    The values of each argument are numbered in the order in which they come up, and a case stays if its numbers add up
    to a multiple of n. So every value of an argument stays if another argument has at least n values.
    """
    numbers = defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("one_of")
        if mark is None:
            continue
        total = 0
        for name, value in item.callspec.params.items():
            known = numbers[item.nodeid.partition("[")[0], name]
            # Not by `id`: whether equal constants are one object depends on whether Python read a .pyc file.
            total += known.setdefault(repr(value), len(known))
        if total % mark.args[0] > 0:
            yield item


@pytest.hookimpl(tryfirst=True)  # before pytest deselects the slow ones
def pytest_collection_modifyitems(items):
    for item in spared(items):
        item.add_marker(pytest.mark.slow)
    order = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test that is skipped for a reason that the `EXPECTED_SKIPS` of its module lack."""
    report = yield
    expected = getattr(item.module, "EXPECTED_SKIPS", None)
    if expected is not None and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not any(known in reason for known in expected):
            report.outcome, report.longrepr = "failed", f"{reason!r} is not among the module's EXPECTED_SKIPS"
    return report
