"""A suite of games: its jobs, their results, and their aggregates."""
