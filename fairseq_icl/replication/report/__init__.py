"""The report of a run: the papers' tables and figures with our numbers beside the published ones."""
