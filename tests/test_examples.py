"""The examples run, and say the same: the notebook, and the plain script of a few lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    text = " ".join(output.get("text", "") for output in outputs)
    assert "60 queries after 32 demonstrations" in text
    assert not re.search(r"Warning|DEBUG|INFO", text), "the notebook is not to be flooded with messages"
    assert any("image/png" in output.get("data", {}) for output in outputs), "the figure shows by itself"
    table = next(output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {}))
    assert "sim_am_delta" in table
    assert "lcgd" in table
    assert "nan" not in table
    assert "option 0" in text, "a prompt is shown"


def test_the_script_of_twelve_lines_runs(tmp_path):
    script = EXAMPLES / "first_steps.py"
    assert len([line for line in script.read_text().splitlines() if line.strip()]) <= 12
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(re.findall(r"^(\w+) +(-?[\d.]+)$", done.stdout, re.MULTILINE))
    assert float(found["accuracy_icl"]) > 0.9
    assert float(found["accuracy_ft"]) > float(found["accuracy_zsl"]) + 0.3, "training at this rate does something"
    assert float(found["rec2ftp"]) > 0
    assert done.stderr == ""
    assert (tmp_path / "sim_aou.png").stat().st_size > 1000
