"""`python -m fedda.cli`: the same as `fedda`."""

from fedda.cli import main

if __name__ == "__main__":
    main()
