"""`python -m envs.codesign FILE.toml`: the same as `fdg codesign FILE.toml`."""

from envs.codesign.command import main

if __name__ == "__main__":
    raise SystemExit(main())
