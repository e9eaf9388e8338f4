"""Page copies between the slab and a layer's host pool, as XLA custom calls in place. One typed wrapper per handler.

For everything planned **between** dispatches: prefill backup, restore, import. `H` host blocks, `N` GPU blocks, `M` pairs:

    pool         u8[H, page_bytes]  pinned_host; row h is this layer's page in host block h
    slab         u8[N, stride]      device; this layer's page in block b starts at byte `offset` of row b
    source, destination  i32[M]     pinned_host (`pinned_ids`); a pair with a `NULL_BLOCK` is padding

Ids are operands, so one program serves every plan; a handler reads them on the host when the program is enqueued, so they
must be ready before dispatch, and no such call may stand in a loop whose body computes them. Every id is range-checked and
every destination checked to be named once before the first byte moves; a refusal is a `jax.errors.JaxRuntimeError` that
names the page, the layer and the bound.

**Aliasing.** Every call has exactly one result, which is its first-named tier's own buffer: XLA refuses a host result in a
tuple. Donate both arrays to the jitted program that holds the call, or XLA copies the whole pool before it.

**Order.** XLA orders by data alone. Reading a host pool and writing it in the same program without a dependency makes two
copies of the pool. So each wrapper returns `(pool, slab)` tied by an `optimization_barrier`: what uses the returned pair
comes after the call, and the old pair must not be used again.

**Fork and join** overlap a backup with compute, inside one program:

    pool, slab = fork_backup(pool, slab, source, destination, offset=place.offset)
    slab, logits = chunk(slab, ...)      # must not write a source page (leased), nor read a destination page
    (slab, logits) = jax.lax.optimization_barrier((slab, logits))
    pool, slab = join_backup(pool, slab)

A join waits for the fork of its own pool, refuses where there was none, and refuses a slab that moved in between. Join
every fork: no program may return with a copy in flight. A handler that fails ends every forked copy before it reports.
An error raised by another op between fork and join is the one case that leaves a copy running: do not reuse that state.

CUDA and CPU handlers share one target name; XLA picks by platform. Source: jax.ffi; XLA's host offloader.
"""

import jax
import numpy as np
from jaxtyping import Array, Int32, UInt8

from hisparse_jax.config import ConfigError
from hisparse_jax.library import FfiError as FfiError
from hisparse_jax.library import ffi_version as ffi_version
from hisparse_jax.library import library_path as library_path
from hisparse_jax.library import load_library as load_library
from pallas_kernels.cuda_kernels import target

_Pool = UInt8[Array, "H page_bytes"]
_Slab = UInt8[Array, "N stride"]
_Ids = Int32[Array, " M"]


def pinned_ids(ids: np.ndarray, device: jax.Device | None = None) -> _Ids:  # pyright: ignore[reportInvalidTypeForm]
    """`ids` as an i32 array in `pinned_host`, landed before it is returned. Later changes to `ids` do not show."""
    sharding = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0], memory_kind="pinned_host")
    return jax.block_until_ready(jax.device_put(np.array(ids, np.int32, copy=True), sharding))


def backup_pages(
    pool: _Pool, slab: _Slab, source: _Ids, destination: _Ids, *, offset: int, layer: str = "host pool"
) -> tuple[_Pool, _Slab]:
    """`pool[destination[i]] = slab[source[i], offset : offset + page_bytes]`, done when its program's next op starts.

    `source` GPU blocks, `destination` host blocks; `layer` names the pool in messages. Returns `(pool, slab)`, tied.
    """
    return jax.lax.optimization_barrier((_copy("backup_pages", pool, slab, source, destination, pool, offset, layer), slab))


def fork_backup(
    pool: _Pool, slab: _Slab, source: _Ids, destination: _Ids, *, offset: int, layer: str = "host pool"
) -> tuple[_Pool, _Slab]:
    """Starts what `backup_pages` does and returns; `join_backup` of the same pool ends it, in the same program."""
    return jax.lax.optimization_barrier((_copy("backup_pages_fork", pool, slab, source, destination, pool, offset, layer), slab))


def join_backup(pool: _Pool, slab: _Slab, *, layer: str = "host pool") -> tuple[_Pool, _Slab]:
    """Waits for the fork open on `pool`; `slab` is the forked slab as it is now, in the same buffer. `(pool, slab)`, tied."""
    _check_spaces(layer, pool=pool, slab=slab)
    load_library()
    call = jax.ffi.ffi_call(target("backup_pages_join"), jax.typeof(pool), input_output_aliases={0: 0})
    return jax.lax.optimization_barrier((call(pool, slab, layer=layer), slab))


def restore_pages(
    pool: _Pool, slab: _Slab, source: _Ids, destination: _Ids, *, offset: int, layer: str = "host pool"
) -> tuple[_Pool, _Slab]:
    """`slab[destination[i], offset : offset + page_bytes] = pool[source[i]]`; bytes beside the page stay. `(pool, slab)`, tied.

    `source` host blocks, `destination` GPU blocks.
    """
    return jax.lax.optimization_barrier((pool, _copy("restore_pages", pool, slab, source, destination, slab, offset, layer)))


def _copy(name: str, pool, slab, source, destination, result, offset: int, layer: str) -> Array:
    _check_spaces(layer, pool=pool, slab=slab, source=source, destination=destination)
    page_bytes, stride = pool.shape[1], slab.shape[1]
    if not 0 <= offset <= stride - page_bytes:
        raise ConfigError(
            f"{name}: {layer}: a page of {page_bytes} bytes at offset={offset} leaves the block of {stride} bytes; "
            "take the offset from the layout's Place."
        )
    load_library()
    aliases = {0 if result is pool else 1: 0}
    call = jax.ffi.ffi_call(target(name), jax.typeof(result), input_output_aliases=aliases)
    return call(pool, slab, source, destination, offset=np.int64(offset), layer=layer)


def _check_spaces(layer: str, **operands: Array) -> None:
    """A handler dereferences what it is given: the wrong memory space would be a crash, so it is refused here."""
    for name, array in operands.items():
        wanted = jax.memory.Space.Device if name == "slab" else jax.memory.Space.Host
        if (space := jax.typeof(array).memory_space) != wanted:
            remedy = "ids come from pinned_ids" if array.ndim == 1 else "pools come from host_memory.make_host_pool"
            raise ConfigError(f"{layer}: {name} lies in {space}, a page copy needs it in {wanted}; {remedy}.")
