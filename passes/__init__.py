"""The passes: each a function from earlier results to a frozen dataclass."""
