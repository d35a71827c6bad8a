"""The search for similar samples: exact, by clusters, pairs above a bound, duplicates."""
