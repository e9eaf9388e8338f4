"""The refusal of a slab that is larger than its device, before a byte of it is made."""

import jax
import psutil

from hisparse_jax.config import ConfigError
from hisparse_jax.layout import CacheLayout


def check_slab_budget(layout: CacheLayout) -> None:
    """Raises `ConfigError` where the slab exceeds all memory that JAX may take on the device; on a CPU, what the machine has.

    What else stands there is not counted: a slab that passes may still be too large beside it.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", psutil.virtual_memory().total)
    if layout.slab_bytes > limit:
        raise ConfigError(
            f"gpu_blocks={layout.gpu_blocks} make a slab of {layout.slab_bytes / 2**30:,.2f} GiB, and {device} has "
            f"{limit / 2**30:,.2f}; lower gpu_blocks or gpu_pool_bytes."
        )
