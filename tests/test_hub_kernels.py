"""Build the repository of type kernel, and load it as a user of the package `kernels` does."""

import ast
import importlib.util
import re
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from helpers import ROOT
from packaging.version import Version

from modeling_iha.interleaving import make_virtual_sequence


KERNELS = ROOT / "kernels"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Build the repository."""
    target = tmp_path_factory.mktemp("kernels") / "iha-kernels"
    runpy.run_path(str(KERNELS / "build.py"))["build"](target)
    return target


@pytest.fixture
def kernel(repository):
    """Import the build for a CPU as a module of another name."""
    package = repository / "build" / "torch-cpu" / "__init__.py"
    spec = importlib.util.spec_from_file_location("built_kernels", package)
    module = sys.modules["built_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "built_kernels"]:
        del sys.modules[name]


@pytest.fixture
def needs_kernels():
    """Skip a test where the package `kernels` is missing."""
    try:
        installed = version("kernels")  # `import kernels` would find our folder of that name
    except PackageNotFoundError:
        pytest.skip("the package kernels is not installed: nothing else here needs it")
    if Version(installed) < Version("0.17"):
        pytest.skip(f"the package kernels {installed} is too old: we have tried 0.17.2")


def test_a_build_imports_pytorch_triton_and_the_standard_library_only(repository):
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    files = [*repository.glob("build/*/*.py")]
    assert len(files) == 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module)
            assert {name.partition(".")[0] for name in names} <= allowed, file


def test_the_repository_is_small_and_its_source_is_that_of_checkpoints(repository):
    files = [path for path in KERNELS.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 100
    source = (ROOT / "modeling_iha" / "triton_kernels.py").read_text(encoding="utf-8").splitlines()
    built = (repository / "build" / "torch-cuda" / "triton_kernels.py").read_text(encoding="utf-8").splitlines()
    assert len(source) == len(built) and sum(old != new for old, new in zip(source, built)) == 2


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_the_layers_compute_what_the_model_does(kernel, by_kernels, rotates, monkeypatch):
    if by_kernels:
        pytest.importorskip("triton", reason="Triton is not installed (make test installs it)")
        monkeypatch.setattr(kernel.layers, "kernels_take", lambda *args: True)
    device = "cuda" if by_kernels and torch.cuda.is_available() else "cpu"  # where Triton's interpreter runs them
    heads = (4, 2, 2)
    states = [torch.randn(2, count, 5, 8, device=device, requires_grad=True) for count in heads]
    mixes = [torch.randn(count, count, 3, device=device, requires_grad=True) for count in heads]
    angles = torch.randn(3, 4, device=device).repeat(1, 2)
    rotation = (angles.cos(), angles.sin()) if rotates else None
    all_virtual = kernel.layers.Expand()(states, mixes, rotation)
    for virtual, each, alpha, table in zip(all_virtual, states, mixes, (rotation, rotation, None)):
        torch.testing.assert_close(virtual, make_virtual_sequence(each, alpha, table))
    weight = torch.randn(4, 3, device=device)
    virtual = all_virtual[0].transpose(1, 2)
    output = kernel.layers.Collapse()(virtual, weight)
    torch.testing.assert_close(output, (virtual.unflatten(1, (5, 3)) * weight.t().unsqueeze(-1)).sum(2))
    (output.sum() + sum(virtual.sum() for virtual in all_virtual[1:])).backward()
    assert all(each.grad.abs().min() > 0 for each in (*states, *mixes))


def test_a_model_of_others_takes_the_layers(repository, needs_kernels):
    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

    class Sum(torch.nn.Module):
        def forward(self, output, weight):
            raise AssertionError("the layer was not replaced")

    layer = use_kernel_forward_from_hub("Collapse")(Sum)()
    mapping = {"Collapse": {"cpu": LocalLayerRepository(repository, layer_name="Collapse")}}
    with use_kernel_mapping(mapping):
        kernelize(layer, mode=Mode.TRAINING, device="cpu")
    assert layer(torch.ones(1, 6, 2, 4), torch.ones(2, 3)).equal(torch.full((1, 2, 2, 4), 3.0))


def test_the_page_of_the_kernels_runs(repository, needs_kernels):
    [block] = re.findall(r"^```python\n(.*?)^```", (KERNELS / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    left = {}
    exec(compile(block.replace("outputs/iha-kernels", str(repository)), "README.md", "exec"), left)
    assert [left[name].shape[1:3] for name in ("query", "key", "value")] == [(4, 32), (2, 32), (2, 32)]
