"""How the twins' numeric programs are compiled: as jitted functions, and with what XLA must leave alone."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

_ALSO = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))[-1:]
COMPILER_OPTIONS = {"xla_disable_hlo_passes": ",".join([*_ALSO, "rematerialization"])}
"""For the `jax.jit` of a function that calls a twin's program; a program called from outside of any trace has them by itself.

XLA counts host pools as if they took GPU memory. Pools larger than what weights and slab leave make it compute values twice
rather than keep them: slower, and other kernels than the twin's, whose program has no pools, so that bits can differ. Passes that
`XLA_FLAGS` disables stay so.
"""


class Program[**P, R]:
    """A jitted function, compiled under `COMPILER_OPTIONS`; inside of another trace, which sets its own, jitted alone.

    Tells the two apart by whether an argument is traced. Otherwise like the result of `jax.jit`.
    """

    def __init__(self, function: Callable[P, R], **options: Any):
        functools.update_wrapper(self, function)
        self.jitted = jax.jit(function, compiler_options=COMPILER_OPTIONS, **options)
        self.inner = jax.jit(function, **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        return (self.inner if traced else self.jitted)(*args, **kwargs)

    def clear_cache(self) -> None:
        """As of `jax.jit`."""
        for jitted in (self.jitted, self.inner):
            jitted.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]  # its stub lacks it

    def __getattr__(self, name: str) -> Any:
        """`lower`, `trace`, `eval_shape` and what else `jax.jit` gives."""
        if name == "jitted":  # not made yet
            raise AttributeError(name)
        return getattr(self.jitted, name)


def program[**P, R](*static: str) -> Callable[[Callable[P, R]], Program[P, R]]:
    """Makes a `Program` of a function of `(model, state, ...)`: arguments named in `static` are static, `state` is donated."""
    return lambda function: Program(function, static_argnames=static, donate_argnames="state")
