"""`python -m fdg.plan`: prints graph and plan for the same flags as `fdg.train`, and runs nothing."""

if __name__ == "__main__":
    from fdg.cli import plan_main

    raise SystemExit(plan_main())
