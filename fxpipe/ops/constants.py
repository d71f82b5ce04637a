"""Constants of a program, compared."""


def same(a: object, b: object) -> bool:
    """Whether they are equal and of one type, so that 1, 1.0 and True are three."""
    return type(a) is type(b) and bool(a == b)
