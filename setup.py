from setuptools import setup

setup()  # everything is said in pyproject.toml
