"""`python -m oncebridge`."""

from oncebridge.cli import main

if __name__ == "__main__":
    main()
