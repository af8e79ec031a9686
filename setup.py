import re
from pathlib import Path

from setuptools import find_packages, setup


# The address of the repository. Replace OWNER before a release: `make release-check` rejects it.
REPOSITORY = "https://github.com/OWNER/modeling-iha"

HERE = Path(__file__).resolve().parent


def constant(file: str, name: str) -> str:
    """Return a string that a file of the package assigns to a name. Importing it would need what is not installed."""
    text = (HERE / "modeling_iha" / file).read_text(encoding="utf-8")
    return re.search(rf'^{name} = "(.+?)"', text, re.MULTILINE)[1]


def readme(version: str) -> str:
    """Return README.md with absolute links to the files of a release, because a package index has only the text."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = text.replace("](#", "](README.md#")
    text = re.sub(r"!\[([^]]*)\]\((?!http)", rf"![\1]({REPOSITORY}/raw/v{version}/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!http)", rf"[\1]({REPOSITORY}/blob/v{version}/", text)


VERSION = constant("__init__.py", "__version__")
OLDEST, FIRST_UNTESTED = (constant("transformers_versions.py", name) for name in ("OLDEST", "FIRST_UNTESTED"))

setup(
    name="modeling-iha",
    version=VERSION,
    description="Interleaved Head Attention for Hugging Face Transformers",
    long_description=readme(VERSION),
    long_description_content_type="text/markdown",
    author="The modeling_iha authors",
    project_urls={
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/v{VERSION}/docs",
        "Changelog": f"{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
        "Paper": "https://arxiv.org/abs/2602.21371",
    },
    keywords=[
        "attention",
        "attention mechanisms",
        "fine-tuning",
        "interleaved head attention",
        "language models",
        "pytorch",
        "transformers",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=["modeling_iha", "configuration_iha", *find_packages(include=["iha", "iha.*"])],
    package_data={
        "modeling_iha": ["py.typed"],
        "configuration_iha": ["*.json", "py.typed"],
        "iha": ["card_template.md"],
        "iha.conversion": ["verify_text.txt"],
    },
    entry_points={"console_scripts": ["iha = iha.cli:main"]},
    python_requires=">=3.11",
    license_expression="Apache-2.0",
    install_requires=[
        # `make test-newest` tells when the bound may move.
        "torch>=2.11",
        f"transformers>={OLDEST},<{FIRST_UNTESTED}",
        "packaging",
        "accelerate",
        "safetensors",
        "filelock>=4",
        "pydantic>=2",
        "typer>=0.19",
    ],
    extras_require={
        # What GGUF files, fine-tuning, the studies and the other commands of a checkout need.
        "scripts": ["datasets", "gguf", "matplotlib", "peft", "reasoning-gym", "scipy", "trl"],
        # What `iha serve` needs.
        "serve": ["transformers[serving]"],
        # `python -m evaluation.run` needs these besides "scripts".
        "evaluation": ["lm_eval", "markdown-it-py", "math-verify[antlr4-13-2]", "nltk", "wonderwords"],
        # Attention cores for a GPU. "flash" is for `attn_implementation="flash_attention_4"` (Hopper, Blackwell), in
        # wheels. PyTorch's `activate_flash_attention_impl("FA4")` cannot use it: see "On a GPU" in docs/SUPPORT.md,
        # also for FlashAttention 3, which is not on PyPI. "flash2" is for "flash_attention_2" (Ampere and later), and
        # compiles for hours (`pip install --no-build-isolation`).
        "flash": ["flash-attn-4[cu13]>=4.0.0b36; platform_system == 'Linux'"],
        "flash2": ["flash-attn>=2.8; platform_system == 'Linux'"],
        "dev": [
            "coverage",
            "hypothesis",
            "ipykernel",
            "mypy",
            "nbclient",
            "parameterized",
            "pytest",
            "pytest-xdist",
            "ruff",
            "transformers-mlinter",
            "bitsandbytes",
            "fastapi",
            "openai",
            "rich",
            "torchao",
            "triton; platform_system == 'Linux'",
            "uvicorn",
        ],
    },
)
