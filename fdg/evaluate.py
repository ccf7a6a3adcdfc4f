"""`python -m fdg.evaluate`: plays whole episodes with trained agents."""

from fdg.commands.using import evaluate_main as main

if __name__ == "__main__":
    raise SystemExit(main())
