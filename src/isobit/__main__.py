"""`python -m isobit` is the `isobit` command."""

from isobit.cli.main import main

if __name__ == "__main__":
    main()
