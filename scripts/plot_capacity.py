"""How much GPU memory does one request hold as its context grows, resident and tiered?

Draws the planner's numbers for V4-Flash under both layouts, and how many requests of each length fit in one slab. No device is
touched. Writes the README's figure; the last line of stdout is JSON.

    .venv/bin/python scripts/plot_capacity.py --out docs/capacity.png
"""

import dataclasses
import json
import pathlib

import matplotlib

from hisparse_jax import capacity
from hisparse_jax.command import run_command, to_bytes
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.layout import CacheLayout, plan_layout

matplotlib.use("agg")

import matplotlib.pyplot as plt

CONTEXTS = tuple(2**n for n in range(12, 21))


@dataclasses.dataclass(frozen=True)
class Args:
    out: pathlib.Path = pathlib.Path("docs/capacity.png")
    """Where the figure goes."""
    model: str = "v4-flash"
    """Preset."""
    hbm_gib: float = 40.0
    """GiB of the slab."""
    host_gib: float = 256.0
    """GiB of the host pools."""


def layout_for(args: Args, rule: str, tokens: int) -> CacheLayout:
    cache = CacheConfig(
        max_model_len=tokens, gpu_pool_bytes=to_bytes("--hbm-gib", args.hbm_gib), rule=rule,
        host_pool_bytes=to_bytes("--host-gib", args.host_gib),
    )  # fmt: skip
    return plan_layout(preset(args.model), cache)


def main(args: Args) -> int:
    if not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}; make it first.")
    figure, (memory, requests) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rows = []
    for rule, style in (("searched", "-"), ("base", "--")):
        fits = [(layout, capacity.concurrency(layout, n)) for n in CONTEXTS for layout in [layout_for(args, rule, n)]]
        resident = [c.pages * layout.growing_groups * layout.stride / 2**20 for layout, c in fits]
        tiered = [min(c.steady * layout.stride / 2**20, r) for (layout, c), r in zip(fits, resident, strict=True)]
        kib = [n // 1024 for n in CONTEXTS]
        memory.plot(kib, resident, style, color="0.55", label=f"resident, {rule} layout")
        memory.plot(kib, tiered, style, color="C0", label=f"tiered, {rule} layout")
        alone = [float(c.resident) for _, c in fits]
        both = [max(float(min(c.gpu, c.host)), a) for (_, c), a in zip(fits, alone, strict=True)]
        requests.plot(kib, alone, style, color="0.55")
        requests.plot(kib, both, style, color="C0")
        rows += [
            {"rule": rule, "context": n, "mib_resident": r, "mib_tiered": t, "requests_resident": a, "requests_tiered": b}
            for n, r, t, a, b in zip(CONTEXTS, resident, tiered, alone, both, strict=True)
        ]
    for axes, what in ((memory, "MiB of slab per request"), (requests, f"requests in {args.hbm_gib:g} GiB")):
        axes.set(xscale="log", yscale="log", xlabel="context, Ki tokens", ylabel=what)
        axes.set_xticks(kib, [str(k) for k in kib])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    memory.legend(fontsize=8)
    figure.suptitle(f"{args.model}, fp8 rows, {args.host_gib:g} GiB of host pools: planned, not measured", fontsize=10)
    figure.savefig(args.out, dpi=130)
    print(json.dumps({"out": str(args.out), "rows": rows}))
    return 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
