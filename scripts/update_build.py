"""Rewrites `BUILD`, which lists every source by name, from the tree. Run it after adding, moving or removing a file.

python scripts/update_build.py
"""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

_HEAD = '''"""Every source of the project, by name. `make build-file` rewrites this file; a test compares it with the tree."""

load("@pypi//:requirements.bzl", "requirement")
load("@rules_cc//cc:defs.bzl", "cc_binary")
load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])

LIBRARY_DEPS = [requirement(name) for name in (
    "chex", "flax", "jax", "jaxlib", "jaxtyping", "ml-dtypes", "numpy", "orbax-checkpoint", "prometheus-client", "psutil",
    "rich", "safetensors", "tyro",
)]

TEST_DEPS = [requirement(name) for name in (
    "beartype", "hypothesis", "jax-cuda13-pjrt", "jax-cuda13-plugin", "pytest", "pytest-timeout", "pytest-xdist",
)]
'''


ON_A_CPU = ["ffi/attend_kernel.h", "ffi/score_kernel.h"]
"""Sources of CUDA kernels that tests run on a CPU."""


def sources(folder: str, *patterns: str) -> list[str]:
    """Files below `folder` that match, as paths from the root, sorted."""
    found = {path for pattern in patterns for path in (ROOT / folder).rglob(pattern) if "__pycache__" not in path.parts}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def rule(kind: str, name: str, **fields: list[str] | str | bool) -> str:
    """One target as Starlark; a list stands one item a line, a string that begins with `=` is an expression."""
    lines = [f'{kind}(\n    name = "{name}",']
    for field, value in fields.items():
        if isinstance(value, list):
            lines.append(f"    {field} = [" + "".join(f'\n        "{item}",' for item in value) + "\n    ],")
        elif isinstance(value, bool):
            lines.append(f"    {field} = {value},")
        else:
            lines.append(f"    {field} = " + (value[1:] if value.startswith("=") else f'"{value}"') + ",")
    return "\n".join([*lines, ")"]) + "\n"


def build_text() -> str:
    """The text that `BUILD` should have."""
    tests = sources("tests", "*.py")
    cases = [path for path in tests if path.startswith("tests/test_")]
    support = [path for path in tests if path not in cases and not path.startswith("tests/h200_programs/")]
    programs = [path for path in tests if path.startswith("tests/h200_programs/")]
    scripts = sources("scripts", "*.py")
    own = '[":hisparse_jax", ":pallas_kernels"]'
    targets = [
        rule("filegroup", "kernels_run_on_a_cpu", srcs=ON_A_CPU),
        rule("py_library", "pallas_kernels", srcs=sources("pallas_kernels", "*.py"), deps="=LIBRARY_DEPS"),
        rule(
            "cc_binary",
            "hisparse_jax/_ffi.so",
            srcs=[*(path for path in sources("ffi", "*.cc", "*.h") if path not in ON_A_CPU), ":kernels_run_on_a_cpu"],
            copts=["-std=c++17"],
            linkopts=["-ldl", "-lpthread"],
            linkshared=True,
            deps=["@pypi//jaxlib:ffi_headers"],
        ),
        rule(
            "py_library",
            "hisparse_jax",
            srcs=sources("hisparse_jax", "*.py"),
            data=[":hisparse_jax/_ffi.so"],
            deps='=LIBRARY_DEPS + [":pallas_kernels"]',
        ),
        rule(
            "py_library",
            "test_support",
            testonly=True,
            srcs=support,
            data=[*programs, *sources("tests", "*.txtpb", "*.npz", "*.json", "*.h", "*.cc"), ":kernels_run_on_a_cpu"],
            deps=f"=LIBRARY_DEPS + TEST_DEPS + {own}",
        ),
    ]
    if kernels := sources("ffi", "*.cu"):
        targets.insert(3, rule("filegroup", "cuda_kernels", srcs=kernels))
    for path in scripts:
        stem = pathlib.PurePath(path).stem
        targets.append(rule("py_binary", stem, srcs=[path], main=path, deps=f"=LIBRARY_DEPS + {own}"))
    for path in cases:
        name = path.removeprefix("tests/").removesuffix(".py").replace("/", "_")
        targets.append(rule("py_test", name, srcs=[path], main="tests/pytest_main.py", args=[path], deps='=[":test_support"]'))
    return "\n".join([_HEAD, *targets])


def main() -> None:
    (ROOT / "BUILD").write_text(build_text())


if __name__ == "__main__":
    main()
