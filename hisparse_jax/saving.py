"""A running engine on disk, and what another needs to go on from there.

    PATH/engine          what all requests share: formats, a digest of the weights, the engine's policies, the requests in order
    PATH/requests/N      one request: what was asked, its tokens so far, and the image of what was computed

Orbax writes each folder. They are made beside PATH, one request after the other, so that only one image is in memory at a
time; the whole appears at PATH in one rename, or not at all. Everything read back is compared with its digest.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from hisparse_jax.images import (
    ImageError,
    Progress,
    RequestImage,
    check_image,
    difference,
    format_fields,
    image_format,
)
from hisparse_jax.layout import CacheLayout
from hisparse_jax.loop import ServingLoop
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError
from hisparse_jax.requests import EngineError, Handle, Request
from hisparse_jax.scheduler import Scheduler, Ticket

KIND = "a saved engine of hisparse_jax"
SMALL_TENSOR = 1 << 16
"""Bytes of the largest weight that goes into the digest whole."""


class SaveError(EngineError):
    """Nothing was written, or what was read cannot be gone on from; the message names the place and the remedy."""


@dataclasses.dataclass(frozen=True)
class SavedEngine:
    """What `load` found. `settings` are the fields of the engine's config; the first of `tickets` gets the first free slot."""

    settings: dict[str, Any]
    next_number: int
    tickets: list[Callable[[Callable[[Handle], None], Callable[[int, int], None] | None], Ticket]]


def save(loop: ServingLoop, settings: dict[str, Any], next_number: int, path: pathlib.Path) -> None:
    """Writes the open requests of an engine between two of its rounds. They go on as if nothing had been.

    Raises `SaveError` where `path` exists, and whatever the file system raises; then nothing stands at `path`.
    """
    if path.exists():
        raise SaveError(f"{path} exists; name a folder that does not.")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent.resolve()))
    try:
        digests = {}
        for ticket in _in_order(loop):
            about, arrays = _pack(ticket, loop.image_of(ticket))
            _write(folder / "requests" / str(ticket.number), about=about, arrays=arrays)
            digests[str(ticket.number)] = _digest(about, arrays)
        header = _shared(loop.runner.model, loop.layout)
        header |= {"settings": settings, "next_number": next_number, "requests": digests}
        _write(folder / "engine", about=header | {"digest": _digest(header)})
        folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def load(path: pathlib.Path, model: DeepseekV4, layout: CacheLayout) -> SavedEngine:
    """Reads a saved engine for another that serves `model` on `layout`.

    Pools, packing, hot slots and places may differ. Raises `SaveError` where `path` holds none or is damaged; where model,
    weights, row formats, page size or compiled shapes differ, since logits would; and for a request that `layout` can
    never hold.
    """
    with _blamed(path):
        header, _ = _read(path / "engine")
        digest = header.pop("digest")
        kind, ours = header.get("kind"), _shared(model, layout)
    if kind != KIND:
        raise SaveError(f"{path} holds {kind!r}, not {KIND}; name the folder that `save` wrote.")
    if digest != _digest(header):
        raise SaveError(f"{path} is damaged: its header does not have the digest that it was written with.")
    if found := difference({name: header[name] for name in ours}, ours):
        name, theirs, here = found
        raise SaveError(f"{path} was saved with {name}={theirs!r}, this engine has {here!r}; restore it where both are the same.")
    tickets = []
    for number, digest in header["requests"].items():
        with _blamed(path):
            about, arrays = _read(path / "requests" / number)
        if digest != _digest(about, arrays):
            raise SaveError(f"{path} is damaged: request {number} does not have the digest that it was written with.")
        tickets.append(_unpack(int(number), about, arrays, layout, path))
    return SavedEngine(header["settings"], header["next_number"], tickets)


def _in_order(loop: ServingLoop) -> list[Ticket]:
    """Open requests as they are to start again: those in slots by age, then the queue."""
    return [*sorted(loop.scheduler.active.values(), key=lambda t: t.number), *loop.scheduler.queue]


def _shared(model: DeepseekV4, layout: CacheLayout) -> dict[str, Any]:
    """What the saving and the restoring engine must have in common."""
    return {
        "kind": KIND,
        **format_fields(image_format(layout)),
        "max_requests": layout.cache.max_requests,
        "chunk_tokens": layout.cache.chunk_tokens,
        "weights": _weights_digest(model),
    }


def _weights_digest(model: DeepseekV4) -> str:
    """Tells two sets of weights apart: names, shapes and types of all, and the bytes of the small ones (norms, sinks, biases)."""
    found = hashlib.sha256()
    for name, x in jax.tree_util.tree_leaves_with_path(model):
        found.update(f"{jax.tree_util.keystr(name)} {x.dtype} {x.shape}".encode())
        if x.nbytes <= SMALL_TENSOR:
            found.update(np.asarray(x).tobytes())
    return found.hexdigest()


def _pack(ticket: Ticket, image: RequestImage | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request as JSON and as arrays."""
    request, handle = ticket.request, ticket.handle
    about = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": float(request.temperature),
        "seed": int(request.seed),
        "stop_token": int(request.stop_token),
        "tenant": request.tenant.hex(),
        "produced": ticket.produced,
        "reserve_all": ticket.reserve_all,
        "started": ticket.started,
        "waited": time.monotonic() - ticket.submitted_at,
        "progress": None if image is None else dataclasses.asdict(image.progress),
    }
    tokens, logits = handle.produced()
    arrays: dict[str, Any] = {"prompt": np.array(request.prompt, np.int32), "counts": ticket.counts}
    arrays |= {} if not tokens else {"tokens": np.array(tokens, np.int32)}
    arrays |= {} if not logits else {"logits": np.stack(logits)}
    arrays |= {} if image is None else {"pages": image.pages, "snapshot": image.snapshot}
    return json.loads(json.dumps(about)), arrays


def _unpack(number: int, about: dict[str, Any], arrays: dict[str, Any], layout: CacheLayout, path: pathlib.Path):
    """What makes the request's ticket, given what its handle needs. Raises `SaveError` for one that `layout` can never hold."""
    names = ("max_new_tokens", "temperature", "seed", "stop_token")
    tenant = bytes.fromhex(about["tenant"])  # a prompt computed anew shares with its own tenant alone
    request = Request(tuple(arrays["prompt"].tolist()), **{name: about[name] for name in names}, tenant=tenant)
    now, image = about["progress"], None
    try:
        Scheduler(layout, growth_reserve=0.0, patience=1, ahead=1).check(request)
        if now is not None:
            progress = Progress(**now | {"traffic": tuple(now["traffic"])})
            image = RequestImage(arrays["pages"], arrays["snapshot"], progress, image_format(layout))
            check_image(image, layout)
    except (PromptError, ImageError) as error:
        raise SaveError(f"{path}: request {number} cannot go on here: {error}") from error

    def make(cancel: Callable[[Handle], None], on_token: Callable[[int, int], None] | None) -> Ticket:
        handle = Handle(number, request, cancel, functools.partial(on_token, number) if on_token else None)
        handle.preload(arrays["tokens"].tolist() if "tokens" in arrays else [], list(arrays.get("logits", ())))
        ticket = Ticket(handle, np.array(arrays["counts"]), submitted_at=time.monotonic() - about["waited"])
        ticket.reserve_all, ticket.started = about["reserve_all"], about["started"]
        if image is not None:
            ticket.image, ticket.produced = image, about["produced"]
            ticket.length, ticket.pages = image.progress.length, image.progress.host_pages
            ticket.traffic = np.array(image.progress.traffic, np.int64)
        return ticket

    return make


def _digest(about: dict[str, Any], arrays: dict[str, Any] | None = None) -> str:
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in jax.tree_util.tree_leaves_with_path(arrays):
        found.update(f"{jax.tree_util.keystr(name)} {x.dtype} {x.shape}".encode())
        found.update(np.ascontiguousarray(x))
    return found.hexdigest()


def _write(folder: pathlib.Path, *, about: dict[str, Any], arrays: dict[str, Any] | None = None) -> None:
    items: dict[str, Any] = {"about": ocp.args.JsonSave(about)}
    if arrays is not None:
        items["arrays"] = ocp.args.PyTreeSave(arrays)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        orbax.save(folder, args=ocp.args.Composite(**items))


def _read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """JSON and numpy arrays of a folder; no arrays where it has none."""
    items: dict[str, Any] = {"about": ocp.args.JsonRestore()}
    if (folder / "arrays").exists():
        items["arrays"] = ocp.args.PyTreeRestore()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        found = orbax.restore(folder.resolve(), args=ocp.args.Composite(**items))
    return found["about"], found["arrays"] if "arrays" in items else {}


@contextlib.contextmanager
def _blamed(path: pathlib.Path) -> Iterator[None]:
    """What fails in here is the checkpoint's fault, whatever Orbax calls it."""
    try:
        yield
    except Exception as error:
        reason = "does not exist" if not path.exists() else f"cannot be read ({type(error).__name__}: {error})"
        raise SaveError(f"{path} {reason}; name a folder that `save` wrote whole.") from error
