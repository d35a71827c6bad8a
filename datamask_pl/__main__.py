"""`python -m datamask_pl` is `python cli.py`."""

from datamask_pl.cli import main

if __name__ == "__main__":
    main()
