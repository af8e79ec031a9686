from setuptools import setup


setup(
    name="modeling-iha",
    version="0.1.0",
    description="Interleaved Head Attention for Hugging Face Transformers",
    # The commands stay in the checkout: their names are too common for anybody's site-packages.
    packages=["modeling_iha", "configuration_iha"],
    package_data={"configuration_iha": ["*.json"]},
    python_requires=">=3.11",
    license="Apache-2.0",
    install_requires=["torch>=2.11", "transformers>=5.17,<6", "accelerate", "safetensors"],
    extras_require={
        # What the commands of this repository need; they run from a checkout.
        "scripts": [
            *("datasets", "filelock", "gguf", "huggingface_hub", "matplotlib", "networkx"),
            *("peft", "plotly", "pydantic", "reasoning-gym", "scipy", "trl"),
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
            *("bitsandbytes", "torchao", "triton; platform_system == 'Linux'"),
            *("fastapi", "openai", "playwright", "rich", "uvicorn"),
        ],
    },
)
