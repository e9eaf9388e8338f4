"""The run's type checker, named in pyproject.toml: beartype, with axes bound across a call's arguments by jaxtyping."""

from beartype import beartype


def functions_only(fn):
    """Checks functions and methods, but no constructor: JAX rebuilds a pytree with whatever its leaves became.

    A numpy copy, a sharding, a `ShapeDtypeStruct`, or a placeholder is then no error. Nor methods that return `Self`,
    which beartype knows inside classes only.
    """
    unknown = fn.__qualname__.endswith("__init__") or "typing.Self" in repr(getattr(fn, "__annotations__", None))
    return fn if unknown else beartype(fn)
