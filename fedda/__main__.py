"""`python -m fedda`: the same as `fedda`."""

from fedda.entry import main

if __name__ == "__main__":
    main()
