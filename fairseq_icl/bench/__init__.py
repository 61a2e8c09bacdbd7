"""`fairseq-icl bench`: our way and the authors' way, measured on the same model, prompts and machine in one run.

Our way is `observe`, `fine_tuned` and `compare`, called as anybody would call them; the authors' way is in authors.py.
"""

from fairseq_icl import compat  # noqa: F401 - before anything imports fairseq
