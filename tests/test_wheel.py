"""The wheel holds all that a user needs: installed elsewhere, it runs the demo and serves fairseq's own commands."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fairseq_icl import __version__
from fairseq_icl.files import PACKAGE

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel in it; the dependencies are those of the tests' own environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: a build leaves folders behind
    ignored = ["--exclude=.venv", "--exclude=.git", "--exclude=runs", "--exclude=tests"]
    source.mkdir()
    tar = subprocess.run(["tar", "-c", *ignored, "."], cwd=PACKAGE.parent, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=source, input=tar.stdout, check=True)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path file lends the libraries without the editable install of this tree.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "env" / "bin"


def test_the_installed_package_is_the_wheels(installed, tmp_path):
    assert run(installed / "fairseq-icl", "--version", cwd=tmp_path).strip() == __version__
    place = run(installed / "python", "-c", "import fairseq_icl; print(fairseq_icl.__path__[0])", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(installed.parent)


def test_the_demo_runs_outside_the_clone(installed, tmp_path):
    printed = run(installed / "fairseq-icl", "demo", "--quick", cwd=tmp_path)
    assert "5 of 5 cells finished" in printed
    assert (tmp_path / "runs" / "demo-quick" / "report" / "report.html").is_file()


def test_fairseq_trains_with_the_installed_plugin(installed, tmp_path):
    place = run(installed / "python", "-c", "import fairseq_icl; print(fairseq_icl.__path__[0])", cwd=tmp_path).strip()
    demo = Path(place) / "demo"
    flags = ["--task", "demonstration_prompting", "--arch", "pretrained_lm", "--criterion", "layer_causal_ce", "--cpu"]
    model = ["--pretrained", demo / "model" / "model.pt", "--bpe", "sentencepiece", "--num-demonstrations", "2"]
    data = ["--dataset", demo / "data" / "demo_sentiment.yaml", "--optimizer", "sgd", "--lr", "0.1"]
    train = [installed / "python", "-m", "fairseq_cli.train", demo / "data", "--user-dir", place]
    run(*train, *flags, *model, *data, "--disable-validation", "--save-dir", tmp_path / "saved", cwd=tmp_path)
    assert (tmp_path / "saved" / "checkpoint_last.pt").is_file()
