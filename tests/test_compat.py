"""What importing the plugin leaves behind."""

import subprocess
import sys


def test_importing_the_plugin_turns_on_nobodys_debug_messages():
    code = "import fairseq_icl, logging; print(logging.getLogger().level == logging.WARNING)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
