"""`python -m fdg.answer`: answers prompts with a trained language model."""

from fdg.commands.using import COMMANDS
from fdg.process_exit import exit_with

main = COMMANDS["answer"]
if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
