"""Which prefixes are cached, by their tokens: chained hashes, the longest hit, and who was used least lately. Plain Python.

A link stands for a page and all before it: SHA-256 over the link of the page before and the page's tokens. The first link of a
chain hangs on a seed of the tenant's salt and of what makes caches incompatible, so that no two tenants, models or row formats
ever have a link in common. A prefix that ends within a page has one more link, over the tokens there are.

Source: the cut at a branch is Marconi's rule for models with recurrent state (arXiv 2411.19379).
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

Links = tuple[bytes, ...]
"""One link a full page, in order."""


@dataclasses.dataclass(frozen=True, eq=False)
class CachedPrefix:
    """A prefix of `length` tokens in a place of the parking; `end` is its last link, that of a partial page included."""

    place: int
    length: int
    links: Links
    end: bytes


class PrefixIndex:
    """At most `capacity` prefixes, over pages of `page_tokens` tokens; `identity` names model and formats."""

    def __init__(self, page_tokens: int, capacity: int, identity: str):
        self.page_tokens, self.capacity = page_tokens, capacity
        self._identity = identity.encode()
        self._by_use: collections.OrderedDict[bytes, CachedPrefix] = collections.OrderedDict()
        self._with_page: dict[bytes, list[CachedPrefix]] = {}
        self._ending_after: dict[bytes, list[CachedPrefix]] = {}

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self):
        """Prefixes, the one used least lately first."""
        return iter(tuple(self._by_use.values()))

    @property
    def num_pages(self) -> int:
        """Different pages in all prefixes: each has one host block and one parking block."""
        return len(self._with_page) + sum(prefix.length % self.page_tokens > 0 for prefix in self._by_use.values())

    def links(self, tenant: bytes, tokens: Sequence[int]) -> Links:
        """The links of the full pages of `tokens`. O(tokens)."""
        ids = _as_ids(tokens)
        parts = (len(self._identity).to_bytes(8, "little"), self._identity, tenant)
        link, chain = hashlib.sha256(b"".join(parts)).digest(), []
        for begin in range(0, len(ids) - self.page_tokens + 1, self.page_tokens):
            link = _link(link, ids[begin : begin + self.page_tokens])
            chain.append(link)
        return tuple(chain)

    def num_known(self, links: Links) -> int:
        """How many leading pages stand in some prefix, whether or not a prefix ends there."""
        return next((n for n, link in enumerate(links) if link not in self._with_page), len(links))

    def find(self, links: Links, tokens: Sequence[int]) -> CachedPrefix | None:
        """The longest prefix of `tokens` that leaves at least one token to compute."""
        most = len(tokens) - 1
        for full in range(self.num_known(links), 0, -1):
            endings = self._ending_after.get(links[full - 1], ())
            for prefix in sorted(endings, key=lambda p: -p.length):
                if prefix.length <= most and prefix.end == self._end(links, tokens[: prefix.length]):
                    return prefix
        return None

    def exact(self, links: Links, tokens: Sequence[int]) -> CachedPrefix | None:
        """The prefix of exactly these tokens, of at least one page."""
        return self._by_use.get(self._end(links, tokens))

    def sharing(self, links: Links) -> tuple[CachedPrefix | None, int]:
        """A prefix with the most of these pages, and how many."""
        known = self.num_known(links)
        return (self._with_page[links[known - 1]][0], known) if known else (None, 0)

    def cuts(self, links: Links, length: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """Lengths at which a prompt that starts at `length` cached tokens is worth caching, ascending.

        Where it leaves what others have computed, since it is the second that goes so far and a third may come; at the last page
        boundary before its end, for its repetition; and at its end, for what continues it.
        """
        page, total = self.page_tokens, len(tokens)
        last = (total - 1) // page
        ends = {page * min(self.num_known(links), last), page * last, total}
        return tuple(sorted(end for end in ends if end > length and end >= page))

    def add(self, place: int, links: Links, tokens: Sequence[int]) -> CachedPrefix:
        """Notes that `place` holds exactly `tokens`, of at least one page; `links` are those of its full pages or more."""
        links = links[: len(tokens) // self.page_tokens]
        prefix = CachedPrefix(place, len(tokens), links, self._end(links, tokens))
        assert prefix.end not in self._by_use and len(self) < self.capacity
        self._by_use[prefix.end] = prefix
        for link in links:
            self._with_page.setdefault(link, []).append(prefix)
        self._ending_after.setdefault(links[-1], []).append(prefix)
        return prefix

    def use(self, prefix: CachedPrefix) -> None:
        """It is the one used last."""
        self._by_use.move_to_end(prefix.end)

    def oldest(self, keep: CachedPrefix | None = None) -> CachedPrefix | None:
        """The one used least lately, but `keep`; None where there is none."""
        return next((prefix for prefix in self._by_use.values() if prefix is not keep), None)

    def remove(self, prefix: CachedPrefix) -> None:
        """Its place is given up."""
        del self._by_use[prefix.end]
        for table, links in ((self._with_page, prefix.links), (self._ending_after, prefix.links[-1:])):
            for link in links:
                table[link].remove(prefix)
                if not table[link]:
                    del table[link]

    def clear(self) -> None:
        """Nothing is cached any more."""
        for table in (self._by_use, self._with_page, self._ending_after):
            table.clear()

    def _end(self, links: Links, tokens: Sequence[int]) -> bytes:
        full = len(tokens) // self.page_tokens
        rest = tokens[full * self.page_tokens :]
        return _link(links[full - 1], _as_ids(rest)) if len(rest) else links[full - 1]


def _as_ids(tokens: Iterable[int]) -> np.ndarray:
    return np.asarray(tokens, np.dtype("<i8"))


def _link(parent: bytes, ids: np.ndarray) -> bytes:
    return hashlib.sha256(parent + ids.tobytes()).digest()
