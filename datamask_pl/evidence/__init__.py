"""Is a mask any good: measures, baselines, curves and pictures of a finished run.

`run` reads a finished run back, `measures` judges masks and shares nothing with the code that learns them,
`comparison` is the record of `compare`, `baselines` are the methods that a mask is compared with, the rest draws the
report.
"""
