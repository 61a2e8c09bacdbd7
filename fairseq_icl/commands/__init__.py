"""The commands of `fairseq-icl`, one module each; `command_line` finds and runs them."""

from fairseq_icl.commands.command_line import COMMANDS, main

__all__ = ["COMMANDS", "main"]
