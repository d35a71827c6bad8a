"""The mathematics, as pure functions of tensors. Imports torch and numpy alone."""
