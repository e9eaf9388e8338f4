"""KV cache specs: what one kind of cache stores for one layer, in bytes, and the registry of the kinds.

A spec is static and hashable. `block_size` counts tokens, so a page of a compressed cache holds `block_size / ratio`
entries; page bytes come from the row format (`rows.py`), which pads fp8 and fp4 pages to 576. The registry says which
manager serves a kind and which kinds may share a group. The kinds that grow with context live in the slab and the
host pool; windows and compressor states live outside, one dense slot per running request.

Source: the cache specs and managers of vLLM's HiSparse for DeepSeek-V4.
"""

import abc
import dataclasses
from typing import ClassVar, Literal, override

from hisparse_jax.config import C4, C128, CacheConfig, ConfigError, ModelConfig
from hisparse_jax.rows import RowFormat, entry_format, index_format

Pool = Literal["gpu", "host"]
Transfer = Literal["yes", "no", "own"]
"""Moved between instances by the tiers, not at all, or by the model's own means."""


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class CacheSpec(abc.ABC):
    """One kind of cache of one layer: a page is what one block of its group holds for this layer."""

    block_size: int
    """Tokens of one page."""

    pool: ClassVar[Pool] = "gpu"
    prefix: ClassVar[bool] = True
    """Whether its blocks may serve a later request with the same prefix."""
    transfer: ClassVar[Transfer] = "own"
    suffix: ClassVar[str]
    """Ends the name of a layer's cache; those of resident and hot caches derive from the source's."""

    @property
    @abc.abstractmethod
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, padding included."""

    def num_blocks(self, tokens: int) -> int:
        """Blocks of one request of `tokens` tokens, one per page of its history."""
        return cdiv(tokens, self.block_size)

    def max_bytes(self, max_model_len: int) -> int:
        """Most bytes that one request takes in one layer."""
        return self.num_blocks(max_model_len) * self.page_bytes


@dataclasses.dataclass(frozen=True)
class CompressedSpec(CacheSpec):
    """Entries of one compress ratio: one row in `ratio` tokens, for the whole history."""

    ratio: int
    row: RowFormat

    @property
    def entries(self) -> int:
        """Rows of one page."""
        return self.block_size // self.ratio

    @property
    @override
    def page_bytes(self) -> int:
        return self.row.page_bytes(self.entries)


class SourceSpec(CompressedSpec):
    """C4 entries on the host: the complete history of every admitted request."""

    pool = "host"
    transfer = "yes"
    suffix = "c4"


class IndexSpec(CompressedSpec):
    """Index keys of a C4 layer that leads: one per C4 entry."""

    transfer = "yes"
    suffix = "index"


class C128Spec(CompressedSpec):
    """Entries of a C128 layer, all read in every step."""

    suffix = "c128"


@dataclasses.dataclass(frozen=True)
class ResidentSpec(CacheSpec):
    """C4 pages on the GPU while memory lasts. Never a prefix of its own: the source's hashes live in the host pool."""

    page_size: int

    prefix = False
    transfer = "no"
    suffix = "c4.resident"

    @property
    @override
    def page_bytes(self) -> int:
        return self.page_size


@dataclasses.dataclass(frozen=True)
class HotSpec(CacheSpec):
    """The hot region of a request that lost pages: a fixed number of blocks, whatever the length."""

    page_size: int
    blocks_per_request: int
    """`cdiv(hot slots, entries per page)`: slots count entries, not tokens."""

    prefix = False
    transfer = "no"
    suffix = "c4.hot"

    @property
    @override
    def page_bytes(self) -> int:
        return self.page_size

    @override
    def num_blocks(self, tokens: int) -> int:
        return self.blocks_per_request


@dataclasses.dataclass(frozen=True)
class SlidingSpec(CacheSpec):
    """Rows of the newest `window` tokens. Here one dense slot; the page figures are those of a block pool."""

    window: int
    row_bytes: int
    page_align: int = 1
    in_flight: int = 1
    """Most tokens of one request in one step."""

    @property
    @override
    def page_bytes(self) -> int:
        return cdiv(self.block_size * self.row_bytes, self.page_align) * self.page_align

    @property
    def dense_bytes(self) -> int:
        """Bytes of one request outside the slab: the window, and a row for each draft, which may yet be rejected."""
        return (self.window + self.in_flight - 1) * self.row_bytes

    @override
    def num_blocks(self, tokens: int) -> int:
        return cdiv(min(self.window - 1 + self.in_flight, tokens), self.block_size) + 1


class WindowSpec(SlidingSpec):
    """Window latents of every layer."""

    suffix = "window"


class C4StateSpec(SlidingSpec):
    """Float32 compressor state of a C4 layer: key and score of both halves of an overlapping window."""

    suffix = "c4.state"


class IndexStateSpec(SlidingSpec):
    """The same for the index keys of a C4 layer that leads."""

    suffix = "index.state"


class C128StateSpec(SlidingSpec):
    """Float32 compressor state of a C128 layer: key and score of one window."""

    suffix = "c128.state"


@dataclasses.dataclass(frozen=True)
class Manager:
    """How the blocks of a kind come and go."""

    name: str
    grows: bool
    """Takes a block per page as the request grows; otherwise a fixed number."""
    loses_pages: bool
    """May give up pages of a running request."""


HOT = Manager("hot", grows=False, loses_pages=False)
"""0 blocks until the request must lose pages, then the whole region at once; kept to the end."""
RESIDENT = Manager("resident", grows=True, loses_pages=True)
"""One block per page and group; every page but the last two may be given up, in all groups together."""
FULL = Manager("full attention", grows=True, loses_pages=False)
"""One block per page, kept to the end."""
SLIDING = Manager("sliding window", grows=False, loses_pages=True)
"""Blocks that left the window go back."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the registry knows of a spec class."""

    manager: Manager
    base: type[CacheSpec]
    """Specs share a group only if their bases are the same."""


_REGISTRY: dict[type[CacheSpec], Kind] = {}


def register(spec_class: type[CacheSpec], manager: Manager, base: type[CacheSpec]) -> None:
    """Enters a spec class. A class is registered for itself alone; subclasses need their own entry."""
    _REGISTRY[spec_class] = Kind(manager, base)


def kind_of(spec_class: type[CacheSpec]) -> Kind:
    """The registry's entry of a spec class; an unregistered class is an error that names it."""
    if spec_class not in _REGISTRY:
        known = ", ".join(sorted(c.__name__ for c in _REGISTRY))
        raise ConfigError(f"cache spec {spec_class.__name__} is not registered; register it, or use one of {known}.")
    return _REGISTRY[spec_class]


def may_share_group(a: CacheSpec, b: CacheSpec) -> bool:
    """Whether one block may hold pages of both: the same uniform base, block size and pool."""
    same_base = kind_of(type(a)).base is kind_of(type(b)).base
    return same_base and a.block_size == b.block_size and a.pool == b.pool


for _spec_class, _manager, _base in (
    (SourceSpec, FULL, CompressedSpec),
    (IndexSpec, FULL, CompressedSpec),
    (C128Spec, FULL, CompressedSpec),
    (ResidentSpec, RESIDENT, ResidentSpec),
    (HotSpec, HOT, HotSpec),
    (WindowSpec, SLIDING, WindowSpec),
    (C4StateSpec, SLIDING, C4StateSpec),
    (IndexStateSpec, SLIDING, IndexStateSpec),
    (C128StateSpec, SLIDING, C128StateSpec),
):
    register(_spec_class, _manager, _base)


@dataclasses.dataclass(frozen=True)
class ModelSpecs:
    """Every cache of a model, as `(layer, spec)` pairs in model order."""

    source: tuple[tuple[int, SourceSpec], ...]
    index: tuple[tuple[int, IndexSpec], ...]
    """Leaders only: a follower reuses its leader's selection and stores no keys."""
    c128: tuple[tuple[int, C128Spec], ...]
    sliding: tuple[tuple[int, SlidingSpec], ...]
    """Windows, then compressor states: outside the slab."""


def model_specs(model: ModelConfig, cache: CacheConfig) -> ModelSpecs:
    """The specs of every layer. Page size: `page_entries` C4 entries, so `4 * page_entries` tokens in every kind."""
    entry, index = entry_format(model, cache.rows), index_format(model, cache.index_format)
    tokens = C4 * cache.page_entries
    leaders = sorted({model.leader_of(layer) for layer in model.c4_layers})

    def sliding(spec_class: type[SlidingSpec], block: int, window: int, row_bytes: int) -> SlidingSpec:
        return spec_class(block, window, row_bytes, entry.page_align, cache.query_rows)

    window = sliding(WindowSpec, 64, model.sliding_window, entry.row_bytes)
    c4_state = sliding(C4StateSpec, C4, 2 * C4, 4 * 4 * model.head_dim)
    index_state = sliding(IndexStateSpec, C4, 2 * C4, 4 * 4 * model.index_head_dim)
    c128_state = sliding(C128StateSpec, 8, C128, 4 * 2 * model.head_dim)
    return ModelSpecs(
        source=tuple((i, SourceSpec(tokens, C4, entry)) for i in model.c4_layers),
        index=tuple((i, IndexSpec(tokens, C4, index)) for i in leaders),
        c128=tuple((i, C128Spec(tokens, C128, entry)) for i in model.c128_layers),
        sliding=tuple((i, window) for i in range(model.num_hidden_layers))
        + tuple((i, c4_state) for i in model.c4_layers)
        + tuple((i, index_state) for i in leaders)
        + tuple((i, c128_state) for i in model.c128_layers),
    )
