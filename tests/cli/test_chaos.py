"""Kills, stops, full disks and damaged files, shortly: the tables are those of a quiet run (scripts/chaos.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "chaos.py"
SMALL = ["audit=false", "vary={lr_scale: [0.5, 2.0]}"]


def test_half_a_minute_of_chaos_changes_no_digit(tmp_path):
    words = [sys.executable, str(SCRIPT), "--events", "12", "--keep", str(tmp_path / "chaos"), *SMALL]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    variables["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=variables, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["problems"] == []
    assert said["cells"] == 6
    assert said["events"] == 12
    assert set(said["kinds"]) & {"kill", "stop"}
