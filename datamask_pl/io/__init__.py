"""Files: paths local and remote, parquet footers, atomic writes, checkpoints, JSON records.

Nothing here knows what a block or a mask is. Whatever is written appears under its name whole or not at all.
"""
