"""`BUILD` lists every source of the tree, once, and nothing that is not there."""

import ast
import collections
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = {
    "hisparse_jax": (".py",),
    "pallas_kernels": (".py",),
    "ffi": (".cc", ".h", ".cu"),
    "scripts": (".py",),
    "tests": (".py",),
}
FIELDS = ("srcs", "hdrs", "data")


def listed_files() -> list[str]:
    """Paths in `srcs`, `hdrs` and `data` of every target; labels of other targets are left out."""
    calls = [node for node in ast.walk(ast.parse((ROOT / "BUILD").read_text())) if isinstance(node, ast.Call)]
    return [
        item.value
        for call in calls
        for field in call.keywords
        if field.arg in FIELDS and isinstance(field.value, ast.List)
        for item in field.value.elts
        if isinstance(item, ast.Constant) and isinstance(item.value, str) and item.value[0] not in ":@/"
    ]


def files_of_the_tree() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder, suffixes in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_every_source_is_listed():
    missing = sorted(files_of_the_tree() - set(listed_files()))
    assert not missing, "run `make build-file`, or list in BUILD:\n" + "\n".join(f'        "{path}",' for path in missing)


def test_every_listed_file_exists():
    gone = sorted(path for path in set(listed_files()) if not (ROOT / path).is_file())
    assert not gone, "run `make build-file`, or take out of BUILD:\n" + "\n".join(f'        "{path}",' for path in gone)


def test_no_file_is_listed_twice():
    counts = collections.Counter(listed_files())
    assert not [path for path, count in counts.items() if count > 1]


def test_there_is_one_build_file():
    tracked = [
        path
        for name in ("BUILD", "BUILD.bazel")
        for path in ROOT.rglob(name)
        if not {".venv", "build", ".git"} & set(path.relative_to(ROOT).parts[:1])
    ]
    assert tracked == [ROOT / "BUILD"]
