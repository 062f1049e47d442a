"""`python -m podracer`."""

from podracer.cli import main

if __name__ == "__main__":
    main()
