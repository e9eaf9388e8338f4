"""What the GPU itself was busy with: kernels and copies by name, from a profile."""

import contextlib
import glob
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileOptions

XLA = re.compile(r"fusion|^wrapped_|^loop_|^input_|^copy(_|$)|^Memset|^redzone")
"""Names of what XLA itself generates around a kernel: index arithmetic, copies, clears."""


class DeviceTimes(dict[str, np.ndarray]):
    """Kernel or copy name to the microseconds of each of its runs, in order."""

    def own(self) -> dict[str, np.ndarray]:
        """Without XLA's own small kernels; everything where nothing else ran."""
        own = {name: times for name, times in self.items() if not XLA.search(name)}
        return own or dict(self)


@contextlib.contextmanager
def device_times() -> Iterator[DeviceTimes]:
    """Collects what runs on the GPUs inside the block; filled when the block ends. Empty on a CPU."""
    times, options = DeviceTimes(), ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield times
        found = defaultdict(list)
        for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
            for plane in ProfileData.from_file(path).planes:
                if plane.name.startswith("/device:GPU"):
                    for line in plane.lines:
                        if line.name.startswith("Stream"):
                            for event in line.events:
                                found[_short(event.name)].append((event.start_ns, event.duration_ns / 1e3))
    times.update({name: np.array([us for _, us in sorted(runs)]) for name, runs in found.items()})


def _short(name: str) -> str:
    """A C++ kernel's name without namespaces, template and parameter lists."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"[<(].*", "", name).rsplit("::", 1)[-1] or name
