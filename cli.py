"""The command line of datamask_pl: `python cli.py --help`."""

from datamask_pl.cli import main

if __name__ == "__main__":
    main()
