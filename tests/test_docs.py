"""The documentation: every page has its place, links lead somewhere, commands are understood, the site builds."""

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fairseq_icl
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.settings import SETTINGS

ROOT = Path(__file__).parent.parent
GENERATED = {"settings.md"}
TOOLS = [
    name for name in ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter") if not importlib.util.find_spec(name)
]


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose own tags mean nothing here."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def pages_of(nav: object) -> list[str]:
    """The pages in a nav, at any depth."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_nav_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = pages_of(config["nav"])
    there = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert sorted(listed) == sorted(there | GENERATED)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_out_of_the_readme_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
    assert any(link.startswith("docs/") for link in links)


def commands_of(page: str) -> list[list[str]]:
    """The words of every `fairseq-icl replicate` in the page's shell blocks, $MODEL filled in."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (model,) = re.findall(r'^MODEL="(.*)"$', text, re.MULTILINE)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^fairseq-icl replicate (.*)$", blocks, re.MULTILINE)
    return [shlex.split(line.replace("$MODEL", model), comments=True) for line in lines]


def test_commands_of_the_afternoon_are_understood() -> None:
    commands = commands_of("gpu_afternoon.md")
    assert len(commands) == 7
    for words in commands:
        config = compose_configuration(friendly([word for word in words if word != "--dry-run"]))
        assert config["model"]["path"].startswith("models/")
    assert {"trajectory", "deutch2024", "dai2023", "audit", "rate_search"} == {
        word.removeprefix("experiment=") for words in commands for word in words if word.startswith("experiment=")
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without running the notebook, which test_examples.py does; a warning ends the build."""
    if TOOLS:
        pytest.skip(f"the extra [docs] is not installed ({', '.join(TOOLS)} missing): the site is not built")
    folder = tmp_path_factory.mktemp("site")
    variables = os.environ | {"OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    variables["DOCS_EXECUTE"] = "false"
    # Without --quiet, under which mkdocs does not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def test_the_site_has_the_notebook(site: Path) -> None:
    page = (site / "first_steps.html").read_text(encoding="utf-8")
    assert "build_prompts" in page


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    settings = (site / "settings.html").read_text(encoding="utf-8")
    assert all(f"<code>{name}</code>" in settings for name in SETTINGS)
    python = (site / "api.html").read_text(encoding="utf-8")
    for name in ("load_model", "build_prompts", "observe", "fine_tuned", "compare", "plot_layers"):
        assert re.search(rf'id="fairseq_icl\.[\w.]*{name}"', python), name
    assert "sim_aou_norm" in (site / "metrics.html").read_text(encoding="utf-8")


def test_fields_are_shown_with_their_comments(site: Path) -> None:
    python = (site / "api.html").read_text(encoding="utf-8")
    assert "(n, C) mean log-probability of the label" in python
    assert "(n, L + 1, P, d) what enters the first layer" in python


@pytest.mark.parametrize("name", [name for name in fairseq_icl.__all__ if name[0].islower()])
def test_public_functions_say_arguments_result_and_an_example(name: str) -> None:
    function = getattr(fairseq_icl, name)
    text = inspect.getdoc(function) or ""
    assert "Args:" in text
    assert "Returns:" in text or "Yields:" in text
    assert "```python" in text.partition("Example:")[2]
    described = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert described == [*inspect.signature(function).parameters]


def test_pages_fetch_nothing_when_they_are_opened(site: Path) -> None:
    for path in site.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="?(?:https?:)?//[^">]*', page)
        fetched += re.findall(r'<link[^>]* rel="?(?:stylesheet|preconnect)[^>]*href="?(?:https?:)?//[^">]*', page)
        fetched += re.findall(r"https?://(?:cdnjs|unpkg|cdn\.)[^\"'\s]*", page)
        # Of the notebook's page, and only where a notebook has such a diagram.
        assert [address for address in fetched if "/mermaid" not in address] == [], path.name
