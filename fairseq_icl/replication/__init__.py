"""A whole paper in one command: plan the cells, run them, store each once, report them beside the published figures."""

FORMATS = ("html", "md", "tex", "csv")
"""Forms that a report is written in."""
