"""`python -m fdg.answer`: says what a trained language model answers to prompts."""

from fdg.commands.using import COMMANDS
from fdg.process_exit import exit_with

main = COMMANDS["answer"]
if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
