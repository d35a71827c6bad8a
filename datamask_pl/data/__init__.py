"""From parquet shards to blocks in memory, and the steps of a block.

In the order in which rows pass: `shards` and `schema` read footers, `plan` says which rows form which block, `loader`
reads ahead, `reader` and `rows` turn row groups into tensors, `limits` and `forced_ids` add what a budget goes by,
`scaling` scales quality. `module` is the LightningDataModule over them; `types` is what others see of it.
"""
