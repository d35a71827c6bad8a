"""The mask's format: a manifest, one parquet part per block, and what is done with them.

`manifest` and `parts` write and read it, `join` finds its rows in source files, `filter` writes the kept rows,
`summary` counts what was kept.
"""
