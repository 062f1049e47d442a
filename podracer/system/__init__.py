"""The operating system as podracer uses it: lines, files, signals, processes, locks, and the place of an error."""
