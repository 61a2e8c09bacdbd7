"""Installation. The pins are versions that are known to work together."""

from setuptools import find_packages, setup

FAIRSEQ = [
    # fairseq 0.12.2 cannot be imported on Python 3.11; fairseq-fixed is the same code with that repaired.
    'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
    'fairseq==0.12.2; python_version < "3.11"',
]

setup(
    name="fairseq-icl",
    version="0.1.0",
    description="In-context learning against gradient descent: a fairseq plugin",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["fairseq_icl", "fairseq_icl.*"]),
    package_data={"fairseq_icl": ["config/**/*.yaml", "config/*.yaml", "demo/model/*", "demo/data/**/*", "**/*.html"]},
    install_requires=[
        "torch==2.13.0",
        *FAIRSEQ,
        "numpy==2.4.6",
        "scipy==1.17.1",
        "pandas==3.1.1",
        "pyarrow==26.0.1",
        "matplotlib==3.11.2",
        "sentencepiece==0.2.2",
        "safetensors==0.8.0",
        "filelock==4.2.10",
        "tqdm==4.70.1",
        "hydra-core==1.3.2",
        "omegaconf==2.3.0",
        "pyyaml==6.0.3",
        "hydra-joblib-launcher==1.2.0",
        "hydra-submitit-launcher==1.2.0",
    ],
    extras_require={
        "test": ["pytest==9.2.0", "pytest-xdist==3.8.0", "hypothesis==6.170.15", "ruff==0.17.4"],
    },
    entry_points={"console_scripts": ["fairseq-icl=fairseq_icl.cli:main"]},
)
