from setuptools import setup


setup(
    name="modeling-iha",
    version="0.1.0",
    description="Interleaved Head Attention for Hugging Face Transformers",
    packages=["modeling_iha", "configuration_iha"],
    package_data={"configuration_iha": ["*.json"]},
    python_requires=">=3.11",
    license="Apache-2.0",
    install_requires=["torch>=2.11", "transformers>=5.17,<6", "accelerate", "safetensors"],
    extras_require={
        # The scripts of this repository; they are run by path, from a checkout.
        "scripts": ["datasets", "gguf", "huggingface_hub", "matplotlib", "peft", "reasoning-gym", "trl"],
        "dev": [
            *("parameterized", "pytest", "pytest-xdist", "ruff"),
            *("bitsandbytes", "hqq", "lm_eval", "torchao", "triton; platform_system == 'Linux'"),
            *("fastapi", "openai", "pydantic", "rich", "uvicorn"),
        ],
    },
)
