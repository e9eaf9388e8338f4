"""The run's type checker, named in pyproject.toml: beartype, with axes bound across a call's arguments by jaxtyping."""

from beartype import beartype


def functions_only(fn):
    """Checks functions and methods, but no constructor: JAX rebuilds a pytree with whatever its leaves became.

    A numpy copy, a sharding, a `ShapeDtypeStruct`, or a placeholder is then no error.
    """
    return fn if fn.__qualname__.endswith("__init__") else beartype(fn)
