"""`podracer bench`: speed, measured next to yardsticks in the same run."""
