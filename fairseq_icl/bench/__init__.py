"""`fairseq-icl bench`: our way and the authors' way, measured on the same model, prompts and machine in one run."""
