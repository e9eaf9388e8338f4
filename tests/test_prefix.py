"""Which prefix is found for which tokens, and which one yields: the index alone, without a cache."""

import itertools

import hypothesis.strategies as st
from hypothesis import given, settings

from hisparse_jax.prefix import PrefixIndex

PAGE = 4
A, B, C = [1] * PAGE, [2] * PAGE, [3] * PAGE


def make(capacity: int = 8, identity: str = "model") -> PrefixIndex:
    return PrefixIndex(PAGE, capacity, identity)


def add(index: PrefixIndex, place: int, tokens: list[int], tenant: bytes = b""):
    return index.add(place, index.links(tenant, tokens), tokens)


def find(index: PrefixIndex, tokens: list[int], tenant: bytes = b"") -> tuple[int, int] | None:
    hit = index.find(index.links(tenant, tokens), tokens)
    return (hit.place, hit.length) if hit else None


def test_the_longest_prefix_is_found_and_a_token_is_left_to_compute():
    index = make()
    add(index, 0, A)
    add(index, 1, A + B)
    add(index, 2, A + B + [3, 3])
    assert find(index, A + B + C) == (2, 10)
    assert find(index, A + B + [3, 3, 9]) == (2, 10)
    assert find(index, A + B + [3, 3]) == (1, 8), "a whole prompt is no prefix of itself"
    assert find(index, A + B + [3]) == (1, 8)
    assert find(index, A + B + [4, 3, 3]) == (1, 8)
    assert find(index, A + B) == (0, 4)
    assert find(index, A + C + B) == (0, 4)
    assert find(index, A) is None and find(index, B + A) is None and find(index, []) is None
    assert find(index, B + B + [3, 3, 9]) is None, "a link stands for all pages before it"


def test_tenants_models_and_formats_have_no_link_in_common():
    index, tokens = make(), A + B + C
    chains = [index.links(b"", tokens), index.links(b"a", tokens), make(identity="other").links(b"", tokens)]
    chains.append(make(identity="model" + "a").links(b"", tokens))
    for one, other in itertools.combinations(chains, 2):
        assert not set(one) & set(other)
    assert all(len(link) == 32 for chain in chains for link in chain) and chains[0] == make().links(b"", tokens)
    add(index, 0, tokens, b"a")
    assert find(index, [*tokens, 7], b"a") == (0, 12)
    assert find(index, [*tokens, 7], b"") is None is find(index, [*tokens, 7], b"b")
    assert index.num_known(chains[0]) == 0 and index.sharing(chains[0]) == (None, 0)


def test_pages_are_shared_with_whoever_has_most_of_them_and_counted_once():
    index = make()
    add(index, 0, A + B + [9])
    add(index, 1, A + C)
    assert index.num_pages == 4  # A, B, [9], C
    like, count = index.sharing(index.links(b"", A + B + C))
    assert like is not None and (like.place, count) == (0, 2)
    like, count = index.sharing(index.links(b"", A + A))
    assert like is not None and count == 1
    index.remove(like)
    assert index.num_pages == {0: 2, 1: 3}[like.place]
    index.clear()
    assert index.num_pages == len(index) == 0 and index.sharing(index.links(b"", A)) == (None, 0)


def test_a_prompt_is_cut_where_it_leaves_the_known_at_its_last_boundary_and_at_its_end():
    index = make()

    def cuts(tokens, length=0):
        return index.cuts(index.links(b"", tokens), length, tokens)

    assert cuts(A + B + [5]) == (8, 9)
    assert cuts(A + B) == (4, 8)
    assert cuts(A + B + [5], length=8) == (9,)
    assert cuts([1, 1, 1]) == (), "less than a page is not cached"
    add(index, 0, A + B + C)
    assert cuts(A + B + B + A + [5]) == (8, 16, 17), "two pages are known, and no prefix ends there"
    assert cuts(A + B + B + A + [5], length=8) == (16, 17)
    assert cuts(A + B + C) == (8, 12)


def test_who_was_used_least_lately_yields():
    index = make()
    first, second, third = (add(index, place, [*tokens, 5]) for place, tokens in enumerate((A, B, C)))
    assert [prefix.place for prefix in index] == [0, 1, 2] and index.oldest() is first
    index.use(first)
    assert index.oldest() is second and index.oldest(keep=second) is third
    index.remove(second)
    index.remove(third)
    assert index.oldest(keep=first) is None and index.exact(first.links, [*A, 5]) is first
    assert index.exact(first.links, [*A, 6]) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=PAGE, max_size=14), max_size=8), st.lists(st.integers(0, 1), max_size=16))
def test_what_is_found_is_what_a_search_by_tokens_finds(cached, wanted):
    index, held = make(), {}
    for place, tokens in enumerate(cached):
        if tuple(tokens) not in held:
            add(index, place, tokens)
            held[tuple(tokens)] = place
    fitting = [tokens for tokens in held if len(tokens) < len(wanted) and list(tokens) == wanted[: len(tokens)]]
    best = max(fitting, key=len, default=None)
    assert find(index, wanted) == (None if best is None else (held[best], len(best)))
    pages = {tokens[: i + PAGE] for tokens in held for i in range(0, len(tokens) - PAGE + 1, PAGE)}
    assert index.num_pages == len(pages) + sum(len(tokens) % PAGE > 0 for tokens in held)
    links = index.links(b"", wanted)
    known = next((n for n in range(len(links)) if tuple(wanted[: (n + 1) * PAGE]) not in pages), len(links))
    assert index.num_known(links) == known == index.sharing(links)[1]
