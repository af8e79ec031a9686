from setuptools import setup


# The commands that `iha` runs come along inside iha_commands: their names are too common for anybody's site-packages.
ROOMS = ["common", "kinds", "model_cards", "hub", "conversion_scripts"]

setup(
    name="modeling-iha",
    version="0.1.0",
    description="Interleaved Head Attention for Hugging Face Transformers",
    packages=["modeling_iha", "configuration_iha", "iha_commands", *(f"iha_commands.{room}" for room in ROOMS)],
    py_modules=["iha_commands.benchmarks.cost"],
    package_dir={f"iha_commands.{room}": room for room in (*ROOMS, "benchmarks")},
    package_data={
        "configuration_iha": ["*.json"],
        "iha_commands.model_cards": ["template.md"],
        "iha_commands.conversion_scripts": ["verify_text.txt"],
    },
    entry_points={"console_scripts": ["iha = iha_commands.run:main"]},
    python_requires=">=3.11",
    license="Apache-2.0",
    install_requires=["torch>=2.11", "transformers>=5.17,<6", "accelerate", "safetensors", "pydantic"],
    extras_require={
        # What GGUF files, fine-tuning, the studies and the other commands of a checkout need.
        "scripts": [
            *("datasets", "gguf", "matplotlib", "networkx", "peft", "plotly", "reasoning-gym", "scipy", "trl"),
        ],
        # What `python -m evaluation.run` needs beside "scripts".
        "evaluation": ["lm_eval", "markdown-it-py", "math-verify[antlr4-13-2]", "nltk", "wonderwords"],
        # What `python -m conversion_scripts.export` needs for `--format onnx` and `--format openvino`.
        "export": ["onnx", "onnxruntime", "onnxscript", "openvino"],
        # Attention cores for a GPU: FlashAttention 4 for Hopper and Blackwell, in wheels; FlashAttention 2 for Ampere
        # and later, which compiles for hours (`pip install --no-build-isolation`).
        "flash": ["flash-attn-4[cu13]>=4.0.0b36; platform_system == 'Linux'"],
        "flash2": ["flash-attn>=2.8; platform_system == 'Linux'"],
        "dev": [
            *("brotli", "coverage", "mypy", "parameterized", "pytest", "pytest-xdist", "ruff"),
            *("bitsandbytes", "fastapi", "openai", "playwright", "rich", "torchao", "uvicorn"),
        ],
    },
)
