"""A request leaves one cache and goes on in another, in every bit as if it had stayed: any token, other ids, other packing."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from parking_runs import BRIEF, LAYOUT, LONG, OPTIONS, PAGE, SMALL, STEPS, Engine, Request, undisturbed, values
from runs import tight_layout

from hisparse_jax.images import RequestImage, export_request, image_format, import_request
from hisparse_jax.layout import CacheLayout
from hisparse_jax.status import Status

pytestmark = pytest.mark.xdist_group("parking")

BASE = tight_layout(SMALL, (6, 5, 3), slack=1, **(OPTIONS | {"rule": "base", "num_hot_slots": 40, "parked_requests": 1}))
IN_PREFILL, IN_DECODE = (1, 3, 4, 127, 384, 385, 387, 388, 511), (600, 639, 640, 641, 643, 644, 659)
"""Around page boundaries of 128 tokens, where entries of 4 and of 128 close, and right before the end."""

WARM = {"seed": 9, "temperature": 0.9}


def shuffled(engine: Engine, seed: int, *, first: str) -> Engine:
    """The engine with its free blocks in random order: even ids before odd ones in all pools, or the reverse."""
    rng = np.random.default_rng(seed)

    def reorder(pool):
        ids = 1 + rng.permutation(len(pool.references) - 1)
        ids = ids[np.argsort(ids % 2 == (first == "even"), kind="stable")]
        ring = np.array(pool.ring)
        ring[: len(ids)] = ids
        return pool.replace(ring=jax.device_put(ring, pool.ring.sharding))

    ledger, lot = engine.state.ledger, engine.parking.ledger
    tables = ledger.tables.replace(pool=reorder(ledger.tables.pool))
    engine.state = engine.state.replace(ledger=ledger.replace(tables=tables, host=reorder(ledger.host)))
    engine.parking = engine.parking.replace(ledger=lot.replace(pool=reorder(lot.pool)))
    engine.poison()
    return engine


def source(layout: CacheLayout) -> Engine:
    return shuffled(Engine(layout), 1, first="even")


def lift(engine: Engine, name: str, slot: int) -> RequestImage:
    """Parks, exports and resumes."""
    engine.preempt(name)
    before = values((engine.state, engine.parking))
    image = export_request(engine.state, engine.parking, engine.requests[name].place, engine.layout)
    chex.assert_trees_all_equal(values((engine.state, engine.parking)), before)
    engine.resume(name, slot)
    return image


@functools.cache
def lifted(layout: CacheLayout) -> dict[int, RequestImage]:
    """Images of one request at many tokens, in prefill and in decode."""
    engine, taken = source(layout), {}
    engine.admit("brief", 3, BRIEF, STEPS)
    engine.prefill("brief")
    engine.admit("long", 0, LONG, STEPS, **WARM)
    for at in IN_PREFILL:
        engine.prefill("long", until=at)
        taken[at] = lift(engine, "long", at % 3)
    engine.prefill("long")
    for at in IN_DECODE:
        engine.decode(at - engine.length("long"))
        taken[at] = lift(engine, "long", at % 3)
    assert not engine.state.homeless.any()
    return taken


def land(engine: Engine, name: str, image: RequestImage, slot: int, prompt=LONG, steps=STEPS) -> None:
    engine.state, engine.parking, place, status = import_request(engine.state, engine.parking, image, engine.layout)
    assert status is Status.OK and place is not None
    engine.check()
    engine.requests[name] = Request(prompt, steps, place=place)
    engine.poison()
    engine.resume(name, slot)


def assert_goes_on(engine: Engine, name: str, at: int, **options) -> None:
    """Every logit from token `at` on is that of a run without a break, on the importer's layout."""
    request = engine.requests[name]
    alone = undisturbed(engine.layout, request.prompt, request.steps, tuple(options.items()))
    mine, theirs = np.concatenate(request.logits), np.concatenate(alone.logits)[at:]
    assert mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes(), f"imported at token {at}"
    assert request.tokens == alone.tokens[len(alone.tokens) - len(request.tokens) :] and len(request.tokens) <= len(mine) + 1


PAIRS = ((1, 3), (4, 127), (385, 387), (388, 511), (600, 639), (640, 643), (644, 659))


@pytest.mark.parametrize("tokens", [(384, 641), *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS)], ids=str)
def test_b9_an_import_ends_on_any_token(tokens):
    """From the base rule's packing to the searched one's, beside a request of the importer's own; ids are shuffled and
    disjoint, and what nobody owns is poison."""
    engine = shuffled(Engine(LAYOUT), 2, first="odd")
    engine.admit("brief", 2, BRIEF[:60], 10)
    engine.prefill("brief")
    for at, slot in zip(tokens, (3, 0)):
        land(engine, str(at), lifted(BASE)[at], slot)
    for at in tokens:
        if at < len(LONG):
            engine.prefill(str(at))
    engine.decode()
    for at in tokens:
        assert_goes_on(engine, str(at), at, **WARM)
        engine.finish(str(at))
    assert_goes_on(engine, "brief", 0)
    engine.finish("brief")
    engine.check_empty()


def test_an_image_depends_on_the_request_alone():
    """Not on ids, packing, companions or leftovers; an imported request gives the image that it came from."""
    ours, theirs = source(LAYOUT), lifted(BASE)
    ours.admit("long", 1, LONG, STEPS, **WARM)
    ours.prefill("long", until=388, chunk=61)
    mine = lift(ours, "long", 2)
    chex.assert_trees_all_equal((mine.pages, mine.snapshot), (theirs[388].pages, theirs[388].snapshot))
    assert (mine.format, theirs[388].format) == (image_format(LAYOUT),) * 2
    for at, image in theirs.items():
        assert {x.shape[0] for x in image.pages.values()} == {-(-at // PAGE)} and image.progress.length == at
        assert not any((x == 255).all() for x in image.pages.values())
    for at in (1, 388, 641):
        engine = shuffled(Engine(LAYOUT), at, first="odd")
        land(engine, "long", theirs[at], 1)
        again = lift(engine, "long", 0)
        chex.assert_trees_all_equal((again.pages, again.snapshot), (theirs[at].pages, theirs[at].snapshot))
        changed = dataclasses.replace(again.progress, traffic=theirs[at].progress.traffic)
        assert changed == theirs[at].progress
