"""A sweep over tunable numbers: its plan, its runs, and its table."""
