"""What every script does around its `main`: options from the command line, an exit code, bad input told in one line."""

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import tyro
from rich.console import Console
from rich.markup import escape

from hisparse_jax.config import ConfigError
from hisparse_jax.ffi import FfiError
from hisparse_jax.prompts import PromptError
from hisparse_jax.status import TierError


def check_least(options: Any, **least: int) -> None:
    """Raises `ConfigError` where an option is below the least that is given for it by name; None is no number."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {bound}.")


def to_bytes(flag: str, gib: float) -> int:
    """Bytes of a number of GiB, of which `flag` takes more than 0 and up to 2^20."""
    if not 0 < gib <= 2**20:
        raise ConfigError(f"{flag} {gib} must be a number of GiB above 0, and at most 1,048,576.")
    return max(1, math.floor(gib * 2**30))


def run_command(main: Callable[[Any], int], options: type, description: str | None) -> NoReturn:
    """Exits with what `main(options)` returns, or with 2 and a line on stderr where it cannot do what was asked.

    A reader of stdout that has gone away is no error. Where there is no NVIDIA GPU, JAX does not look for one.
    """
    if "JAX_PLATFORMS" not in os.environ and not any(pathlib.Path(gpu).exists() for gpu in ("/dev/nvidia0", "/dev/dxg")):
        jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(BrokenPipeError):
        arguments = tyro.cli(options, description=description)
        try:
            sys.exit(main(arguments))
        except (ConfigError, PromptError, TierError, FfiError) as error:
            name = pathlib.Path(sys.argv[0]).stem
            Console(stderr=True).print(f"[red]{name}:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            sys.exit(2)
    sys.exit(0)
