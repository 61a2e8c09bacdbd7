"""Before torch multiplies anything: some virtual machines announce AMX and then do not know its instructions."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
