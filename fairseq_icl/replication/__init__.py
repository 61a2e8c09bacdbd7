"""A whole paper in one command: plan the cells, run them, store each once, report them beside the published figures."""
