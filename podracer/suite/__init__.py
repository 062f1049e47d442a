"""A suite of games: its jobs, their results, and what they come to."""
