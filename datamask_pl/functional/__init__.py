"""The mathematics, as pure functions of tensors. Imports torch and numpy alone.

`budget`, `constraint` and `multilinear` say which masks are allowed and how likely each sample is; `terms` holds the
formulas of the objectives, `rollouts` the drawn masks and their gradients, `neighbors` the search for similar samples,
`swaps` the local search after the last step.
"""
