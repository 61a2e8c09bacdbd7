"""A whole paper in one command: plan the cells, run them, store each once, report them beside the published figures."""

FORMATS = ("html", "md", "tex", "csv")
"""Forms that a report can be written in."""
USUAL_FORMATS = ("html", "csv")
"""Those that it is written in unless others are asked for; the others draw every figure as a file."""
