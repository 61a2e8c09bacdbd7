"""With this folder on PYTHONPATH, every Python process has as many simulated GPUs as SIMULATED_GPUS says.

SIMULATED_MEMORY is how many bytes they have together.
"""

import os
import sys
from pathlib import Path

if "SIMULATED_GPUS" in os.environ:
    sys.path.append(str(Path(__file__).parent.parent))
    import simulated_gpu

    gpu = simulated_gpu.start(int(os.environ["SIMULATED_GPUS"]))
    gpu.total = int(os.environ.get("SIMULATED_MEMORY", gpu.total))
